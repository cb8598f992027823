"""cuda_src/allreduce_norm.cu: all-reduce, residual add and RMSNorm in one launch."""

from __future__ import annotations

import numpy as np

from qwen_raw.device import BF16, F32, Arg, Buffer
from qwen_raw.errors import require
from qwen_raw.kernels.allreduce_lamport import BLOCKS, LamportWorkspace
from qwen_raw.kernels.linear import check_buffer
from qwen_raw.kernels.peers import PACK, check_owner, launch_polling, variant

STEM, ENTRY = "allreduce_norm", "allreduce_norm_bf16"
WARP = 32
MOST_PACKS = 2  # of a row, a thread
MOST_THREADS = 512
LONGEST = PACK * MOST_PACKS * MOST_THREADS  # elements of a row
MOST_BLOCKS = 8  # that share a row: a cluster
USUAL_THREADS = 128
MEETING = 2 * 16 + 16 * 4 + 16  # bytes of struct Meeting


def row_blocks_for(packs: int, most: int) -> int:
    """How many blocks share a row of so many packs: a power of two, a thread for each pack."""
    blocks = 1
    while 2 * blocks <= min(most, MOST_BLOCKS) and blocks * USUAL_THREADS < packs:
        blocks *= 2
    return blocks


def allreduce_norm(
    ws: LamportWorkspace,
    total: Buffer,
    out: Buffer,
    h: Buffer,
    inp: Buffer,
    g: Buffer,
    eps: float,
    *,
    block: int | None = None,
    row_blocks: int | None = None,
    pdl: bool = False,
) -> None:
    """total f32 [T, D] = h f32 [T, D] + Σ over ranks of inp bf16 [T, D]; out bf16 [T, D] = RMSNorm(total)·g bf16 [D].

    `total` may be h itself. Before sm_90 one block works on a row. Every rank must make the same calls in the same
    order, with the same shapes, `block` and `row_blocks`.
    """
    T, D = inp.shape
    require(T > 0 and D > 0 and D % PACK == 0, f"rows of {D} elements are not whole packs of {PACK}")
    require(ws.capacity * PACK >= T * D, f"a message of {T * D} elements, the workspace takes {ws.capacity * PACK}")
    for buffer, dtype, name in ((inp, BF16, "in"), (h, F32, "h"), (total, F32, "total"), (out, BF16, "out")):
        check_buffer(buffer, (T, D), dtype, name)
    check_buffer(g, (D,), BF16, "g")
    check_owner(ws, inp, total, out)
    check_owner(ws, h, out)
    require(D <= LONGEST, f"rows of {D} elements, the kernel takes {LONGEST}")
    packs = D // PACK
    if total.ptr != h.ptr:
        check_owner(ws, h, total)
    kernel = ws.dev.kernel(STEM, f"{ENTRY}_r{variant(ws.world)}")
    clusters = ws.dev.resident_clusters(kernel, WARP, MEETING, 2) > 0
    most = ws.most_blocks // T if clusters else 1
    across = row_blocks or row_blocks_for(packs, most)
    shareable = min(packs, MOST_BLOCKS)
    require(1 <= across <= shareable, f"{across} blocks share a row of {packs} packs: 1 to {shareable} can")
    require(across == 1 or clusters, f"{ws.dev.name} has no clusters: one block a row")
    share = -(-packs // across)
    threads = block or min(-(-share // WARP) * WARP, MOST_THREADS)
    require(
        WARP <= threads <= MOST_THREADS and threads % WARP == 0,
        f"a block of {threads} threads: whole warps, up to {MOST_THREADS}",
    )
    require(
        share <= MOST_PACKS * threads,
        f"rows of {D} elements: {across} blocks of {threads} take {PACK * MOST_PACKS * threads * across}",
    )
    args: list[Arg] = [total, out, h, inp, g, ws.struct, np.int32(D), np.float32(eps)]
    launch_polling(ws, STEM, ENTRY, (across, T, 1), threads, args, most=BLOCKS, pdl=pdl, cluster=across, smem=MEETING)
