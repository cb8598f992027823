"""cuda_src/allreduce_norm.cu: all-reduce, residual add and RMSNorm in one launch."""

from __future__ import annotations

import numpy as np

from qwen_raw.device import BF16, F32, Arg, Buffer
from qwen_raw.errors import require
from qwen_raw.kernels.allreduce_lamport import BLOCKS, LamportWorkspace
from qwen_raw.kernels.linear import check_buffer
from qwen_raw.kernels.peers import PACK, check_owner, launch_polling

STEM = "allreduce_norm"
LONGEST = 8192  # elements of a row: 32 warps of packs, a lane for each to poll


def allreduce_norm(
    ws: LamportWorkspace,
    h: Buffer,
    out: Buffer,
    inp: Buffer,
    g: Buffer,
    eps: float,
    *,
    block: int = 128,
    pdl: bool = False,
) -> None:
    """h f32 [T, D] += Σ over ranks of inp bf16 [T, D]; then out bf16 [T, D] = RMSNorm(h)·g bf16 [D].

    Every rank must make the same calls in the same order, with the same shapes and block.
    """
    T, D = inp.shape
    require(T > 0 and D > 0 and D % PACK == 0, f"rows of {D} elements are not whole packs of {PACK}")
    require(D <= LONGEST, f"rows of {D} elements, the kernel takes {LONGEST}")
    require(ws.capacity * PACK >= T * D, f"a message of {T * D} elements, the workspace takes {ws.capacity * PACK}")
    for buffer, dtype, name in ((inp, BF16, "in"), (h, F32, "h"), (out, BF16, "out")):
        check_buffer(buffer, (T, D), dtype, name)
    check_buffer(g, (D,), BF16, "g")
    check_owner(ws, inp, h, out)
    require(32 <= block <= 256 and block % 32 == 0, f"a block of {block} threads: whole warps, up to 256")
    grid = (-(-D // (PACK * block)), T, 1)
    args: list[Arg] = [h, out, inp, g, ws.struct, np.int32(D), np.float32(eps)]
    launch_polling(ws, STEM, "allreduce_norm_bf16", grid, block, args, most=BLOCKS, pdl=pdl)
