"""How the GPUs of this machine reach each other: what the driver and NVML say of every pair, and whether it is true.

A pair is used only after it has been tried: each GPU stores into the other's memory and the owner compares, then each
loads from the other's and compares (cuda_src/peercheck.cu).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations

from qwen_raw.device import U32, Device
from qwen_raw.driver.check import DriverError
from qwen_raw.driver.probe import PeerPath, peer_paths
from qwen_raw.errors import QwenRawError
from qwen_raw.kernels.peercheck import count_wrong, store_pattern

SIZES = (16, 4 << 10, 1 << 20)  # bytes that are tried


@dataclass(frozen=True, slots=True)
class Link:
    """GPU `path.source` reaching into the memory of GPU `path.target`; `problem` says why it must not be used."""

    path: PeerPath
    problem: str | None


def links(devices: Sequence[Device]) -> list[Link]:
    """Every ordered pair of the GPUs behind `devices`, tried; peer access is enabled between those that have it."""
    gpus = {dev.ordinal: dev for dev in devices}
    known = {(path.source, path.target): path for path in peer_paths(sorted(gpus))}
    found = []
    for source, target in permutations(sorted(gpus), 2):
        try:
            problem = verify(gpus[source], gpus[target])
        except DriverError:
            raise  # a GPU that is lost answers nothing any more
        except QwenRawError as error:
            problem = str(error)
        found.append(Link(known[source, target], problem))
    return found


def require_links(devices: Sequence[Device]) -> None:
    """Tries every pair of distinct GPUs behind `devices`.

    Raises QwenRawError for the first pair that has no peer access, or that loses what crosses the link.
    """
    gpus = {dev.ordinal: dev for dev in devices}
    for source, target in permutations(gpus.values(), 2):
        problem = verify(source, target)
        if problem is not None:
            raise QwenRawError(f"GPUs {source.ordinal} and {target.ordinal} cannot work together: {problem}")


def verify(source: Device, target: Device) -> str | None:
    """What is wrong with the way from `source` into `target`'s memory, tried in several sizes; None: nothing.

    Synchronises both. Raises QwenRawError if they have no peer path at all.
    """
    source.enable_peer(target)
    data = target.empty((max(SIZES) // 4,), U32)
    wrongs = [dev.zeros((1,), U32) for dev in (target, source)]
    target.synchronize()  # whatever it still does to this memory, the other GPU's stores would race with
    for number, nbytes in enumerate(SIZES):
        part, seed = data.view((nbytes // 4,)), 2 * number
        for writer, reader, wrong, what in (
            (
                source,
                target,
                wrongs[0],
                f"words stored by GPU {source.ordinal} did not arrive at GPU {target.ordinal}",
            ),
            (target, source, wrongs[1], f"words loaded by GPU {source.ordinal} from GPU {target.ordinal} were wrong"),
        ):
            seed += 1
            store_pattern(writer, part, seed)
            writer.synchronize()
            count_wrong(reader, wrong, part, seed)
            count = int(wrong.download()[0])
            if count:
                return f"{count} of {nbytes // 4} {what}"
    return None
