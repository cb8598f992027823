"""As kernel_cases.py: the small kernels between prefill's products."""

from __future__ import annotations

import numpy as np
from conformance.kernel_cases import EPS, Case, Outputs, exact, fp32, rotary, rounded
from conformance.machines import Machine, Output
from kernel_reference import bf16_input

from loaders.dtypes import e4m3_to_f32
from qwen_raw.device import BF16, E4M3, F32
from qwen_raw.kernels.norm import rmsnorm_e4m3
from qwen_raw.kernels.qkv_finish import qkv_finish
from qwen_raw.kernels.quantize import quantize_tokens
from qwen_raw.kernels.swiglu import swiglu


def run_quantize_tokens(machine: Machine, rng: np.random.Generator) -> Outputs:
    """Maxima, IEEE divisions and single multiplications: every bit."""
    dev, (a, _) = machine.dev, bf16_input(rng, 9, 1040)
    a[3] = 0
    q, scale = dev.zeros((9, 1040), E4M3), dev.zeros((9,), F32)
    quantize_tokens(dev, q, scale, dev.array(a))
    return {"q": exact(q.download()), "scale": exact(scale.download())}


def run_rmsnorm_e4m3(machine: Machine, rng: np.random.Generator) -> Outputs:
    """Codes do not depend on the row's rms at all: every one; the scale on rsqrtf."""
    dev = machine.dev
    h, g = dev.array(fp32(rng, 5, 2048)), dev.array(bf16_input(rng, 2048)[0])
    out, scale = dev.zeros((5, 2048), E4M3), dev.zeros((5,), F32)
    rmsnorm_e4m3(dev, out, scale, h, g, EPS)
    scales = scale.download()
    return {"codes": exact(e4m3_to_f32(out.download())), "scale": Output(scales, 2.0**-20 * scales.astype(np.float64))}


def run_qkv_finish(machine: Machine, rng: np.random.Generator) -> Outputs:
    """One rotation in fp32, which a GPU contracts, rounded to bf16; v has a sum alone: every bit."""
    dev, T, H, KV, HD = machine.dev, 3, 2, 1, 64
    y, bias = dev.array(bf16_input(rng, T, (H + 2 * KV) * HD)[0]), dev.array(fp32(rng, (H + 2 * KV) * HD))
    q, k, v = dev.zeros((T, H, HD), BF16), dev.zeros((KV, 8, HD), BF16), dev.zeros((KV, 8, HD), BF16)
    span = dev.array(np.array([4, T - 1], np.int32))
    qkv_finish(dev, q, k, v, y, bias, dev.array(rotary(rng, 8, HD)), span)
    slack = 2.0**-20
    return {"q": rounded(q.download(), slack), "k": rounded(k.download(), slack), "v": exact(v.download())}


def run_swiglu(machine: Machine, rng: np.random.Generator) -> Outputs:
    """ex2 and a reciprocal, approximate on a GPU, then one rounding."""
    dev = machine.dev
    (g, _), (u, _), act = bf16_input(rng, 5, 1032), bf16_input(rng, 5, 1032), dev.zeros((5, 1032), BF16)
    swiglu(dev, act, dev.array(g), dev.array(u))
    return {"act": rounded(act.download())}


PREFILL = [
    Case("quantize_tokens_bf16", run_quantize_tokens),
    Case("rmsnorm_e4m3", run_rmsnorm_e4m3),
    Case("qkv_finish_bf16", run_qkv_finish),
    Case("swiglu_bf16", run_swiglu),
]
