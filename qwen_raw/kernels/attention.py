"""Prefill's attention: Hopper's kernel where it runs, the plain one elsewhere."""

from __future__ import annotations

from qwen_raw.device import BF16, Buffer, Device
from qwen_raw.kernels import attn_prefill_sm90 as sm90
from qwen_raw.kernels.attn_prefill import attn_prefill
from qwen_raw.kernels.attn_prefill_sm90 import attn_prefill_sm90
from qwen_raw.kernels.kv_widen import kv_widen


def suits_sm90(arch: str, HD: int) -> bool:
    """Whether heads of this dim run Hopper's kernel on this architecture."""
    return arch == sm90.ARCH and HD in sm90.STAGES


def prefill_attention(
    dev: Device,
    out: Buffer,
    q: Buffer,
    k_cache: Buffer,
    v_cache: Buffer,
    span: Buffer,
    *,
    fine: Buffer | None = None,
    wide: tuple[Buffer, Buffer] | None = None,
    hopper: bool = True,
) -> None:
    """out bf16 [rows, H, HD], as both kernels. `hopper`: by Hopper's kernel, where it runs.

    `wide`: room for an e4m3 cache as bf16, k and v [KV, max_len, HD], where Hopper's kernel is to attend to one, too.
    """
    if not hopper or not suits_sm90(dev.arch, out.shape[2]) or (k_cache.dtype != BF16 and wide is None):
        attn_prefill(dev, out, q, k_cache, v_cache, span, fine=fine)
        return
    if wide is not None and fine is not None:
        kv_widen(dev, *wide, k_cache, v_cache, span, fine=fine)
        k_cache, v_cache = wide
    attn_prefill_sm90(dev, out, q, k_cache, v_cache, span)
