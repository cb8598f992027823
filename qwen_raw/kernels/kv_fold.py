"""cuda_src/kv_fold.cu: norms of weight rows, and factors folded into them, at load."""

from __future__ import annotations

import numpy as np

from qwen_raw.device import BF16, F32, Arg, Buffer, Device
from qwen_raw.kernels.linear import Linear, check_buffer, check_linear, weight_args

STEM = "kv_fold"


def kv_norms(dev: Device, norms: Buffer, w: Linear, g: Buffer) -> None:
    """norms f32 [N]: the root of the sum of squares of each row of w, element by element times g bf16 [K]."""
    fp8 = w.scale is not None
    check_buffer(norms, (w.N,), F32, "norms")
    check_buffer(g, (w.K,), BF16, "g")
    args: list[Arg] = [norms, *weight_args(fp8, w), g, np.int32(w.K)]
    dev.launch(dev.kernel(STEM, f"kv_norms_{'fp8' if fp8 else 'bf16'}"), (w.N, 1, 1), (256, 1, 1), args)


def kv_fold(dev: Device, w: Linear, factor: np.ndarray[tuple[int], np.dtype[np.float32]]) -> None:
    """Row n of w times factor[n], in place: exact for powers of two. Of e4m3 it is the scale that is multiplied."""
    check_linear(w, w.scale is not None)
    if w.scale is not None:
        w.scale.upload(w.scale.download() * factor)
        return
    dev.launch(dev.kernel(STEM, "kv_fold_bf16"), (w.N, 1, 1), (256, 1, 1), [w.weight, dev.array(factor), np.int32(w.K)])
