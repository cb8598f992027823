"""cuda_src/allreduce_norm.cu: all-reduce, residual add and RMSNorm in one launch."""

from __future__ import annotations

import numpy as np

from qwen_raw.device import BF16, F32, Arg, Buffer
from qwen_raw.errors import require
from qwen_raw.kernels.allreduce_lamport import BLOCKS, LamportWorkspace
from qwen_raw.kernels.linear import check_buffer
from qwen_raw.kernels.peers import PACK, check_owner, launch_polling

STEM = "allreduce_norm"
MOST_PACKS = 2  # of a row, a thread
MOST_THREADS = 512
LONGEST = PACK * MOST_PACKS * MOST_THREADS  # elements of a row
ROW_BLOCKS = 8  # that share a row where the launcher chooses


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

    `total` may be h itself; then one block works on a row, which is slower. Every rank must make the same calls in the
    same order, with the same shapes and block.
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
    packs, alone = D // PACK, total.ptr == h.ptr
    if not alone:
        check_owner(ws, h, total)
    threads = block or -(-packs // (MOST_PACKS * 32)) * 32
    require(
        32 <= threads <= MOST_THREADS and threads % 32 == 0,
        f"a block of {threads} threads: whole warps, up to {MOST_THREADS}",
    )
    require(packs <= MOST_PACKS * threads, f"rows of {D} elements: a block of {threads} takes {PACK * 2 * threads}")
    across = row_blocks or (1 if alone else max(1, min(ROW_BLOCKS, ws.most_blocks // T, packs)))
    require(1 <= across <= packs, f"{across} blocks share a row of {packs} packs")
    require(across == 1 or not alone, "several blocks share a row, so the sum cannot replace h")
    args: list[Arg] = [total, out, h, inp, g, ws.struct, np.int32(D), np.float32(eps)]
    launch_polling(ws, STEM, "allreduce_norm_bf16", (across, T, 1), threads, args, most=BLOCKS, pdl=pdl)
