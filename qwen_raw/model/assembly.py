"""From a checkpoint and devices to ranks: what fits is checked, weights are loaded, and the ranks are connected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from qwen_raw.comm.measure import INLINE, ROWS, measure_chunk, measure_token
from qwen_raw.comm.reduce import Reducer, create_reducers, usual_path
from qwen_raw.device import BF16, Device
from qwen_raw.errors import QwenRawError
from qwen_raw.generation.runner import Progress
from qwen_raw.kernels import allreduce_rows
from qwen_raw.kernels.allreduce_rows import RowBuffers, RowsWorkspace, rows_of_owner
from qwen_raw.kernels.gemv_exchange import Exchange
from qwen_raw.kernels.gemv_exchange_bf16 import EXCHANGE as EXCHANGE_BF16
from qwen_raw.kernels.gemv_exchange_fp8 import EXCHANGE as EXCHANGE_FP8
from qwen_raw.kernels.peers import ranks_on_gpu
from qwen_raw.model.kv_fp8 import fold
from qwen_raw.model.loading import CheckpointLike
from qwen_raw.model.rank import Rank
from qwen_raw.model.residual import Alone, Inline, Residual, Summed
from qwen_raw.model.shard import Shard, shards
from qwen_raw.model.state import (
    DecodeBuffers,
    KVCache,
    PrefillBuffers,
    create_samplers,
    device_rope_table,
    state_bytes,
)
from qwen_raw.model.weights import check_shapes, load_weights, weight_bytes

T = TypeVar("T")
MEASURED_CHUNK = 4 << 20  # elements of the longest message that is timed; longer ones go as it does
LIMIT_NS = 10_000_000_000  # how long a rank waits for another before it gives up


def assemble(
    devices: Sequence[Device],
    checkpoint: CheckpointLike,
    *,
    fp8: bool,
    max_len: int,
    comm: str = "auto",
    limit_ns: int = LIMIT_NS,
    few: int = 1,
    kv: str = "bf16",
    progress: Progress | None = None,
) -> list[Rank]:
    """One rank a device, in order; a GPU may have several. Nothing has been launched that waits for another rank.

    `comm`: the path of the sums over ranks (qwen_raw/comm/reduce.py), for up to `few` tokens at once. `kv`:
    type of the KV cache, "bf16" or "fp8". Raises QwenRawError where the model does not fit.
    """
    parts = shards(checkpoint.config, len(devices))
    for part in parts:
        check_shapes(part, fp8)
    check_memory(devices, parts, fp8=fp8, max_len=max_len, kv=kv)
    total, done, weights = sum(weight_bytes(part, fp8) for part in parts), 0, []
    for device, part in zip(devices, parts, strict=True):
        weights.append(load_weights(device, checkpoint, part, fp8=fp8, progress=section(progress, done, total)))
        done += weight_bytes(part, fp8)
    fits = [fold(*each) if kv == "fp8" else None for each in zip(devices, parts, weights, strict=True)]
    samplers = create_samplers(devices, parts, limit_ns)
    prefill = [
        PrefillBuffers.create(device, part.local, max_len, fp8=fp8, pdl=ranks_on_gpu(devices, rank) == 1)
        for rank, (device, part) in enumerate(zip(devices, parts, strict=True))
    ]
    residuals = _residuals(devices, parts, prefill, comm, few, limit_ns, fp8=fp8)
    return [
        Rank(
            device=device,
            shard=part,
            weights=weights[rank],
            cache=KVCache.create(device, part.local, max_len, fits[rank]),
            rope=device_rope_table(device, part.local, max_len),
            decode=DecodeBuffers.create(device, part.local, max_len, samplers[rank]),
            prefill=prefill[rank],
            residual=residuals[rank],
            shares_gpu=ranks_on_gpu(devices, rank) > 1,
        )
        for rank, (device, part) in enumerate(zip(devices, parts, strict=True))
    ]


def section(progress: Progress | None, before: int, total: int) -> Progress | None:
    """Progress of one rank's loading as part of all."""
    if progress is None:
        return None
    report = progress
    return lambda stage, done, _: report(stage, min(before + done, total), total)


def _residuals(
    devices: Sequence[Device],
    parts: Sequence[Shard],
    prefill: Sequence[PrefillBuffers],
    comm: str,
    few: int,
    limit_ns: int,
    *,
    fp8: bool,
) -> list[Residual]:
    """Up to `few` tokens are summed by `comm`; a chunk, where bytes count, by what is fastest unless `comm` insists."""
    if len(devices) == 1:
        return [Alone(devices[0])]
    D, local, token, message, chunk = parts[0].whole.D, parts[0].local, comm, comm, prefill[0].chunk
    kernels, widths = EXCHANGE_FP8 if fp8 else EXCHANGE_BF16, [local.H * local.HD, local.I]
    if comm == "auto":
        measured = measure_token(devices, D)
        token = usual_path(D) if measured is None else measured.fastest
        if token == INLINE and not all(map(kernels.takes, widths)):
            token = usual_path(D)
    if comm in ("auto", "lamport", INLINE):  # lamport would push every chunk to all: twice the bytes at 4 ranks
        message = _path_of_chunk(devices, chunk, D)
    inline = token == INLINE
    path = usual_path(few * D) if inline else token
    small = create_reducers(devices, path=path, elements=few * D, limit_ns=limit_ns)
    large: Sequence[Reducer | None] = [None] * len(devices)
    rows: Sequence[RowsWorkspace | None] = [None] * len(devices)
    if message == ROWS:
        rows = RowsWorkspace.create(
            devices, [_row_buffers(*own, len(devices)) for own in zip(devices, prefill, strict=True)], limit_ns=limit_ns
        )
    else:
        large = create_reducers(devices, path=message, elements=chunk * D, limit_ns=limit_ns)
    shares = [device.empty((D,), BF16) for device in devices]
    summed = [Summed(*ends, few) for ends in zip(devices, shares, small, large, rows, strict=True)]
    if not inline:
        return list(summed)
    kernels.load(devices, widths)
    ends = Exchange.create(devices, D, limit_ns=limit_ns)
    several = Exchange.create(devices, few * D, limit_ns=limit_ns) if few > 1 else ends
    return [Inline(end, more, kernels, other) for end, more, other in zip(ends, several, summed, strict=True)]


def _path_of_chunk(devices: Sequence[Device], chunk: int, D: int) -> str:
    measured = measure_chunk(devices, max(1, min(chunk, MEASURED_CHUNK // D)), D)
    if measured is not None:
        return measured.fastest
    return ROWS if allreduce_rows.takes(D) else usual_path(chunk * D)


def _row_buffers(device: Device, b: PrefillBuffers, world: int) -> RowBuffers:
    """O and down leave their shares in n, or push them, and the rows go where the products look for them."""
    x, (T, D) = b.products.room(b.n), b.n.shape
    received = device.empty((world * rows_of_owner(T, world) * D,), BF16) if b.products.pushes(T) else None
    return RowBuffers(b.products.normed, b.n, x.values, x.scale, b.h, received)


def by_gpu(devices: Sequence[Device], values: Sequence[T]) -> dict[int, list[T]]:
    """The ranks' values by the GPU that they run on."""
    found: dict[int, list[T]] = {}
    for device, value in zip(devices, values, strict=True):
        found.setdefault(device.ordinal, []).append(value)
    return found


def check_memory(
    devices: Sequence[Device], parts: Sequence[Shard], *, fp8: bool, max_len: int, kv: str = "bf16"
) -> None:
    """Raises QwenRawError, with the sizes, if a GPU has not room for what its ranks will hold."""
    c = parts[0].whole
    for ordinal, here in by_gpu(devices, list(zip(devices, parts, strict=True))).items():
        free, total = here[0][0].memory_info()
        weights = sum(weight_bytes(part, fp8) for _, part in here)
        state = sum(state_bytes(part.local, max_len, kv, device.arch) for device, part in here)
        if weights + state <= free:
            continue
        gib = [f"{n / 2**30:.1f} GiB" for n in (weights, state, free, total)]
        name = here[0][0].name + (f" (GPU {ordinal})" if len(parts) > 1 else "")
        share = f" for {len(here)} of {len(parts)} ranks" if len(parts) > 1 else ""
        smaller = ["--max-model-len"] if weights < free else []
        advice = [f"a smaller {' or '.join([*smaller, 'model'])}", *([] if fp8 else ["--dtype fp8"])]
        advice += ["--kv-cache-dtype fp8"] if kv == "bf16" and weights < free else []
        raise QwenRawError(
            f"{c.name or 'the model'} needs {gib[0]} for weights and {gib[1]} for a context of {max_len}{share}; "
            f"{gib[2]} of {gib[3]} are free on {name}: use {', '.join(advice)}, or more GPUs"
        )


def free_bytes(devices: Sequence[Device]) -> list[int]:
    """Free memory of each GPU among the devices, in the order in which they name them."""
    return [here[0].memory_info()[0] for here in by_gpu(devices, list(devices)).values()]


def describe(devices: Sequence[Device]) -> str:
    """For people: "NVIDIA H200", "2 × NVIDIA H200", "8 ranks on 2 × NVIDIA H200"."""
    if devices[0].kind == "sim":
        return "SIMT simulator" + (f", {len(devices)} ranks" if len(devices) > 1 else "")
    if len(devices) == 1:
        return devices[0].name
    gpus = by_gpu(devices, [device.name for device in devices])
    names = sorted({name for names in gpus.values() for name in names})
    ranks = f"{len(devices)} ranks on " if len(gpus) < len(devices) else ""
    count = f"{len(gpus)} × " if len(gpus) > 1 else ""
    return ranks + count + " and ".join(names)
