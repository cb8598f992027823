"""cuda_src/allreduce_twoshot.cu: reduce-scatter and all-gather in one kernel, for large messages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qwen_raw.device import Buffer, Device
from qwen_raw.kernels.allreduce_flag import BLOCKS, FlagWorkspace, check_block, create_ends
from qwen_raw.kernels.peers import check_message, connect, launch_polling, message_grid

STEM = "allreduce_twoshot"


class TwoShotWorkspace(FlagWorkspace):
    """A FlagWorkspace that has results too."""

    @staticmethod
    def create(devices: Sequence[Device], capacity: int, *, limit_ns: int) -> list[FlagWorkspace]:
        """All ranks' ends, zeroed and synchronised."""
        connect(devices, STEM, ["allreduce_twoshot_bf16", "allreduce_twoshot_add_bf16"])
        return create_ends(devices, capacity, limit_ns, results=True)


def allreduce_twoshot(
    ws: FlagWorkspace,
    out: Buffer,
    inp: Buffer,
    *,
    add: bool = False,
    block: int = 512,
    grid: int | None = None,
    pdl: bool = False,
) -> None:
    """out bf16 [n] = Σ over ranks of inp bf16 [n]; `add`: out f32 [n] += that sum rounded to bf16.

    Every rank must make the same calls in the same order, with the same n, block and grid.
    """
    n = check_message(ws, out, inp, add)
    check_block(ws, block)
    blocks = message_grid(ws, n, block) if grid is None else grid
    name = f"allreduce_twoshot_{'add_' if add else ''}bf16"
    launch_polling(ws, STEM, name, (blocks, 1, 1), block, [out, inp, ws.struct, np.int32(n)], most=BLOCKS, pdl=pdl)
