"""safetensors without the safetensors package's NumPy front end, which knows neither bf16 nor e4m3.

File: u64 little-endian length n of the header, n bytes of JSON (padded with spaces), then the tensors' bytes. The
header maps each name to {"dtype", "shape", "data_offsets": [begin, end]}, offsets counted from the end of the header;
`__metadata__` is a map of strings. The tensors cover the bytes without gap or overlap.
"""

import json
import mmap
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from loaders.tensor import NUMPY_DTYPES, Tensor
from qwen_raw.errors import UsageError

__all__ = ["Tensor", "read_safetensors"]

MAX_HEADER = 100_000_000  # bytes; the format's own limit
LFS_POINTER = b"version https://git-lfs"


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of one file by name, memory-mapped. Raises UsageError on any malformed file."""
    data, header = _map_file(path)
    entries: list[tuple[int, int, str]] = []
    tensors: dict[str, Tensor] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype, shape, begin, end = _parse_entry(path, name, entry)
        entries.append((begin, end, name))
        tensors[name] = Tensor(name, dtype, shape, partial(_view, data, dtype, shape, begin, end))
    _check_layout(path, sorted(entries), data.size)
    return tensors


def _view(data: npt.NDArray[np.uint8], dtype: str, shape: tuple[int, ...], begin: int, end: int) -> npt.NDArray[Any]:
    return data[begin:end].view(NUMPY_DTYPES[dtype]).reshape(shape)


def _map_file(path: Path) -> tuple[npt.NDArray[np.uint8], dict[str, Any]]:
    """(the mapped tensor bytes, the parsed header)."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            start = file.read(len(LFS_POINTER))
            if start == LFS_POINTER:
                raise UsageError(f"{path} is a Git LFS pointer, not the weights: run `git lfs pull` in its folder")
            if size < 8:
                raise UsageError(f"{path} is truncated: {size} bytes, a safetensors file has at least 8")
            length = int.from_bytes(start[:8], "little")
            if length > MAX_HEADER:
                raise UsageError(f"{path} is not a safetensors file: its header would be {length} bytes long")
            if 8 + length > size:
                raise UsageError(f"{path} is truncated: its header is {length} bytes long, the file {size}")
            file.seek(8)
            header = _parse_header(path, file.read(length))
            if size == 8 + length:
                return np.empty(0, np.uint8), header
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    return np.frombuffer(mapped, np.uint8, offset=8 + length), header


def _parse_header(path: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise UsageError(f"{path}: duplicate entry {twice!r} in the header")
        return found

    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise UsageError(f"{path} has a malformed header, not JSON: {error}") from error
    if not isinstance(header, dict):
        raise UsageError(f"{path} has a malformed header: a {type(header).__name__}, expected a JSON object")
    return header


def _are_sizes(values: Any) -> bool:
    """Whether `values` is a list of integers ≥ 0 (JSON's true and false are not integers)."""
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _parse_entry(path: Path, name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """(dtype, shape, begin, end) of a header entry."""
    where = f"{path}: tensor {name}"
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise UsageError(f"{where} has a malformed entry, expected dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in NUMPY_DTYPES:
        raise UsageError(f"{where} has the unknown dtype {dtype!r}; known are {', '.join(NUMPY_DTYPES)}")
    if not _are_sizes(shape):
        raise UsageError(f"{where} has the malformed shape {shape!r}")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise UsageError(f"{where} has the malformed data_offsets {offsets!r}")
    begin, end = offsets
    expected = prod(shape) * NUMPY_DTYPES[dtype].itemsize
    if end - begin != expected:
        raise UsageError(f"{where} has {end - begin} bytes, {dtype} {shape} takes {expected}")
    return dtype, tuple(shape), begin, end


def _check_layout(path: Path, entries: list[tuple[int, int, str]], size: int) -> None:
    """`entries` (begin, end, name), sorted, cover bytes 0…size once each."""
    at, gap, previous = 0, "", ""
    for begin, end, name in entries:
        if begin < at:
            raise UsageError(f"{path}: tensors {previous} and {name} overlap at offset {begin}")
        if begin > at and not gap:
            gap = f"{path}: {begin - at} bytes before tensor {name} belong to no tensor"
        # A layout without gaps that is too long is a file cut short; otherwise it is this entry that is wrong.
        if end > size and gap:
            raise UsageError(f"{path}: tensor {name} ends at offset {end}, past the end of the {size} bytes of data")
        at, previous = end, name
    if at > size:
        raise UsageError(f"{path} is truncated: its tensors take {at} bytes, {size} are there")
    if gap:
        raise UsageError(gap)
    if at < size:
        raise UsageError(f"{path}: {size - at} bytes after the last tensor belong to no tensor")
