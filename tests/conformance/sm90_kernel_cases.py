"""A case for each entry point of Hopper's kernels: every variant of each product, tiles cut; attention."""

from __future__ import annotations

from typing import Any

import numpy as np
from conformance.attn_cases import attended, row_slack
from conformance.kernel_cases import Case, Outputs, exact, fp32, rotary, rounded
from conformance.machines import Array, Machine, Output
from conformance.prefill_cases import PREFILL
from kernel_reference import bf16_input, block_tokens, make_linear, silu

from loaders.dtypes import e4m3_to_f32, f32_to_bf16, quantize_rows_e4m3
from qwen_raw.device import BF16, E4M3, U8
from qwen_raw.kernels import gemm_bf16_sm90, gemm_fp8_sm90
from qwen_raw.kernels.attn_prefill_sm90 import attn_prefill_sm90
from qwen_raw.kernels.gemm_sm90 import OPERATIONS, VARIANTS, Choice, GemmSm90, Tokens, exponent_row
from qwen_raw.kernels.linear import Linear

SHORT_K = 272  # a tail within a slice of either type
BLOCKS_K = 5 * 128 + 16


def operands(
    machine: Machine, rng: np.random.Generator, T: int, fp8: bool, rows: int, blocks: bool = False
) -> tuple[Tokens, Linear, Any]:
    """Tokens, weights, and what the sums may be off by: the exact product comes with it."""
    dev, K = machine.dev, BLOCKS_K if blocks else SHORT_K
    w, W = make_linear(dev, rng, rows, K, fp8)
    if blocks:
        x, X = block_tokens(dev, rng, T, K, 0.5)
    elif fp8:
        q, scale = quantize_rows_e4m3(rng.standard_normal((T, K)).astype(np.float32))
        X = e4m3_to_f32(q).astype(np.float64) * scale[:, None]
        x = Tokens(dev.array(q), dev.array(scale.astype(np.float32)))
    else:
        bits, X = bf16_input(rng, T, K)
        x = Tokens(dev.array(bits))
    # A k-step of 32 e4m3 cuts at 2^-13 of what it adds to, one of 16 bf16 as mma.sync does; pieces are added in fp32.
    # Where a block's scale is another, sums go on times a power of two: they are exact, and so is the error's share.
    step = 2.0**-13 * -(-K // 32) if fp8 else machine.mma_error * (-(-K // 16) + 4)
    return x, w, (X @ W.T, step * (np.abs(X) @ np.abs(W).T))


def tokens_of(name: str) -> int:
    v = VARIANTS[name]
    return v.BN - 3 if v.few else 133


def create(machine: Machine, fp8: bool) -> GemmSm90:
    return (gemm_fp8_sm90 if fp8 else gemm_bf16_sm90).create(machine.dev)  # type: ignore[arg-type]


def run(op: str, name: str, fp8: bool, machine: Machine, rng: np.random.Generator) -> Outputs:
    dev, T, choice, gemm = machine.dev, tokens_of(name), Choice(VARIANTS[name], 3), create(machine, fp8)
    if op in ("add", "add_blocks", "store"):
        x, w, (Y, cut) = operands(machine, rng, T, fp8, 264, op == "add_blocks")
        if op == "store":
            c = dev.zeros((T, 264), BF16)
            gemm.store(dev, c, x, w, choice)
            return {"c": rounded(c.download(), cut, share=1.0 if fp8 else 0.02)}
        old = (fp32(rng, T, 264) * np.abs(Y).mean(1, keepdims=True)).astype(np.float32)  # neither is lost in the other
        h = dev.array(old)
        gemm.add(dev, h, x, w, choice)
        return {"h": Output(h.download(), cut + 2.0**-22 * (np.abs(old) + np.abs(Y)))}
    if op == "swiglu":
        x, w, (Y, cut) = operands(machine, rng, T, fp8, 2 * 136)
        act = dev.zeros((T, 136), BF16)
        gemm.swiglu(dev, act, x, w.rows(0, 136), w.rows(136, 136), choice)
        (gate, up), (d_gate, d_up) = np.split(Y, 2, 1), np.split(cut, 2, 1)
        slack: Array = 1.1 * d_gate * np.abs(up) + np.abs(silu(gate)) * d_up + d_gate * d_up
        return {"act": rounded(act.download(), slack, share=1.0 if fp8 else 0.05)}
    H, KV, HD, max_len = 2, 1, 128 if VARIANTS[name].heads_of_128 else 64, T + 5
    x, w, (Y, cut) = operands(machine, rng, T, fp8, (H + 2 * KV) * HD)
    bias, rope = fp32(rng, w.N), dev.array(rotary(rng, max_len, HD))
    q, k, v = dev.zeros((T, H, HD), BF16), dev.zeros((KV, max_len, HD), BF16), dev.zeros((KV, max_len, HD), BF16)
    span = dev.array(np.array([3, T - 1], np.int32))
    gemm.qkv(dev, q, k, v, x, w, dev.array(bias), rope, span, choice)
    limit = 2 * float(cut.max()) + 2.0**-21 * float(np.abs(Y).max() + np.abs(bias).max())
    share = 1.0 if fp8 else 0.02
    return {n: rounded(b.download(), limit, share=share) for n, b in (("q", q), ("k", k), ("v", v))}


def attention(HD: int, e4m3: bool = False) -> Case:
    def run(machine: Machine, rng: np.random.Generator) -> Outputs:
        dev, T, pos0, H, KV, max_len = machine.dev, 140, 30, 4, 2, 180
        (q, Q), (k, K), (v, V) = (bf16_input(rng, *s) for s in ((T, H, HD), (KV, max_len, HD), (KV, max_len, HD)))
        if e4m3:  # heads with scales of their own: averages of N(0, 1) and times 128 are not near where a scale ends
            V[1] *= 128
            v = f32_to_bf16(V.astype(np.float32))
        out, span = dev.zeros((T, H, HD), BF16), dev.array(np.array([pos0, T], np.int32))
        coded = Tokens(dev.zeros((T, H * HD), E4M3), exponents=dev.zeros((T, exponent_row(H * HD)), U8))
        buffers = [dev.array(b) for b in (q, k, v)]
        attn_prefill_sm90(dev, coded if e4m3 else out, *buffers, span)  # type: ignore[arg-type]
        rows = [(Q[t, h], K[h // 2, : pos0 + t + 1], V[h // 2, : pos0 + t + 1]) for t in range(T) for h in range(H)]
        return attended_codes(coded, rows, H) if e4m3 else {"out": attended(out, rows)}

    return Case(f"attn_prefill_sm90_{'e4m3' if e4m3 else 'bf16'}_hd{HD}", run)


def attended_codes(out: Tokens, rows: list[tuple[Array, Array, Array]], H: int) -> Outputs:
    """As attended(): codes, each times its head's scale, may round to the next; scales are the same."""
    assert out.exponents is not None
    exponents, codes = out.exponents.download(), out.values.download()
    T = len(codes)
    units = 2.0 ** (exponents[:, :H, None].astype(np.float64) - 127)
    values = e4m3_to_f32(codes).astype(np.float64).reshape(T, H, -1) * units
    step = 2.0**-3 * np.abs(values) + 2.0**-9 * units  # the next code
    return {"exponents": exact(exponents), "out": Output(values, step + row_slack(rows).reshape(T, H, 1), 0.02)}


def hopper_cases() -> list[Case]:
    def case(op: str, name: str, fp8: bool) -> Case:
        entry = f"gemm_{op}_{'fp8' if fp8 else 'bf16'}_{name}"
        return Case(entry, lambda machine, rng: run(op, name, fp8, machine, rng))

    return [*PREFILL, *(attention(HD) for HD in (64, 128)), attention(128, e4m3=True)] + [
        case(op, name, fp8)
        for fp8 in (False, True)
        for op, names in OPERATIONS.items()
        if fp8 or op != "add_blocks"
        for name in names
    ]
