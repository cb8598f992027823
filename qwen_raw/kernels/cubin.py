"""What a cubin says of its kernels, read from its ELF sections alone: no GPU, no cuobjdump.

Each kernel K has a section .text.K (its sh_info holds the register count in bits 24…31), .nv.info.K (attributes), and
.nv.shared.K if it has static shared memory. Attributes of .nv.info are records of format (1 byte), id (1 byte), then a
16-bit value, or a 16-bit length and that many bytes. The ids below are those that `cuobjdump -elf` prints.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from qwen_raw.errors import QwenRawError

_PAYLOAD = 4  # format: length, then bytes; the other formats carry their value in the 16 bits
# Attribute ids. In .nv.info (of all kernels): symbol index, value. In .nv.info.K: the value alone.
_MAX_THREADS = 0x05
_FRAME_SIZE = 0x11
_KPARAM_INFO = 0x17
_MAX_STACK_SIZE = 0x23
_REGCOUNT = 0x2F
# From sm_90 on the system's own kilobyte of each block is counted in .nv.shared.K; the limit of a launch leaves it out.
_RESERVED_SMEM = 1024


@dataclass(frozen=True, slots=True)
class Resources:
    """What one kernel takes. `local_bytes` is per thread: spilled registers and arrays that did not fit registers."""

    registers: int
    local_bytes: int
    stack_bytes: int  # local_bytes plus the frames of the functions that it calls
    static_smem: int  # bytes
    max_threads: int  # of a block, by its __launch_bounds__
    params: tuple[int, ...]  # sizes in bytes, in order


@dataclass(frozen=True, slots=True)
class _Section:
    name: str
    kind: int
    info: int
    size: int
    data: bytes


def resources(path: Path) -> dict[str, Resources]:
    """Kernel name → what it takes.

    Raises QwenRawError if the file is not a cubin.
    """
    return parse(path.read_bytes(), str(path))


def parse(image: bytes, label: str = "the image") -> dict[str, Resources]:
    """`resources` of a cubin in memory; `label` names it in errors."""
    try:
        sections = list(_sections(image))
        return _kernels(sections)
    except (struct.error, IndexError, KeyError, UnicodeDecodeError) as error:
        raise QwenRawError(f"{label} is not a whole cubin: {error}") from error


def _kernels(sections: list[_Section]) -> dict[str, Resources]:
    reserved = _RESERVED_SMEM if any(s.name == ".nv.shared.reserved.0" for s in sections) else 0
    shared = {
        s.name.removeprefix(".nv.shared."): s.size - reserved for s in sections if s.name.startswith(".nv.shared.")
    }
    infos = {s.name.removeprefix(".nv.info."): s.data for s in sections if s.name.startswith(".nv.info.")}
    symbols = _symbols(sections)
    totals: dict[tuple[int, str], int] = {}
    for section in sections:
        if section.name == ".nv.info":
            for attribute, payload in _attributes(section.data):
                if len(payload) == 8:
                    symbol, value = struct.unpack("<II", payload)
                    totals[attribute, symbols[symbol]] = value
    found = {}
    for section in sections:
        name = section.name.removeprefix(".text.")
        if name == section.name or name not in infos:
            continue
        own = list(_attributes(infos[name]))
        frame = totals.get((_FRAME_SIZE, name), 0)
        found[name] = Resources(
            registers=totals.get((_REGCOUNT, name), section.info >> 24),
            local_bytes=frame,
            stack_bytes=max(frame, totals.get((_MAX_STACK_SIZE, name), 0)),
            static_smem=shared.get(name, 0),
            max_threads=next((_product(payload) for a, payload in own if a == _MAX_THREADS), 1024),
            params=_params(own),
        )
    return found


def _params(attributes: list[tuple[int, bytes]]) -> tuple[int, ...]:
    """Parameter sizes in order of declaration: each record is index, ordinal | offset « 16, flags | size « 18."""
    sizes = {}
    for attribute, payload in attributes:
        if attribute == _KPARAM_INFO:
            _, ordinal, flags = struct.unpack("<III", payload)
            sizes[ordinal & 0xFFFF] = flags >> 18
    return tuple(sizes[i] for i in range(len(sizes)))


def _product(payload: bytes) -> int:
    x, y, z = struct.unpack("<III", payload)
    return int(x * y * z)


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(data):
        form, attribute, value = struct.unpack_from("<BBH", data, at)
        at += 4
        if form == _PAYLOAD:
            if at + value > len(data):
                raise IndexError(f"attribute {attribute:#x} runs past its section")
            yield attribute, data[at : at + value]
            at += value


def _symbols(sections: list[_Section]) -> dict[int, str]:
    """Symbol index → name, from the symbol table (section kind 2) and its strings."""
    by_name = {s.name: s for s in sections}
    table, strings = by_name[".symtab"].data, by_name[".strtab"].data
    return {i: _string(strings, struct.unpack_from("<I", table, 24 * i)[0]) for i in range(len(table) // 24)}


def _sections(image: bytes) -> Iterator[_Section]:
    if image[:5] != b"\x7fELF\x02":
        raise IndexError("it does not begin like a 64-bit ELF file")
    segments, table = struct.unpack_from("<QQ", image, 0x20)
    segment_size, segment_count, size, count, names = struct.unpack_from("<HHHHH", image, 0x36)
    if max(table + size * count, segments + segment_size * segment_count) > len(image):
        raise IndexError("its tables run past the end")
    rows = [struct.unpack_from("<IIQQQQII", image, table + size * i) for i in range(count)]
    strings = image[rows[names][4] : rows[names][4] + rows[names][5]]
    for name, kind, _flags, _addr, offset, nbytes, _link, info in rows:
        stored = 0 if kind == 8 else nbytes  # 8: no bits in the file (shared memory)
        if offset + stored > len(image):
            raise IndexError(f"section {_string(strings, name)} runs past the end")
        yield _Section(_string(strings, name), kind, info, nbytes, image[offset : offset + stored])


def _string(table: bytes, at: int) -> str:
    return table[at : table.index(b"\0", at)].decode()
