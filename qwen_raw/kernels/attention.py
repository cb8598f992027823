"""Prefill's attention: Hopper's kernel where it runs, the plain one elsewhere."""

from __future__ import annotations

from qwen_raw.device import BF16, Buffer, Device
from qwen_raw.errors import require
from qwen_raw.kernels import attn_prefill_sm90 as sm90
from qwen_raw.kernels.attn_prefill import attn_prefill
from qwen_raw.kernels.attn_prefill_sm90 import attn_prefill_sm90
from qwen_raw.kernels.gemm_sm90 import Tokens
from qwen_raw.kernels.kv_widen import kv_widen


def suits_sm90(arch: str, HD: int) -> bool:
    """Whether heads of this dim run Hopper's kernel on this architecture."""
    return arch == sm90.ARCH and HD in sm90.STAGES


def on_hopper(arch: str, HD: int, k_cache: Buffer, wide: tuple[Buffer, Buffer] | None, *, hopper: bool = True) -> bool:
    """Whether `prefill_attention` takes Hopper's kernel."""
    return hopper and suits_sm90(arch, HD) and (k_cache.dtype == BF16 or wide is not None)


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
    blocks: Tokens | None = None,
) -> None:
    """out bf16 [rows, H, HD], as both kernels. `hopper`: by Hopper's kernel, where it runs.

    `blocks`: Hopper's kernel writes there instead of `out`, e4m3 [rows, H·HD] with exponents; where it runs only.
    `wide`: room for an e4m3 cache as bf16, k and v [KV, max_len, HD], where Hopper's kernel is to attend to one, too.
    """
    if not on_hopper(dev.arch, out.shape[2], k_cache, wide, hopper=hopper):
        require(blocks is None, "only Hopper's attention writes e4m3")
        attn_prefill(dev, out, q, k_cache, v_cache, span, fine=fine)
        return
    if wide is not None and fine is not None:
        kv_widen(dev, *wide, k_cache, v_cache, span, fine=fine)
        k_cache, v_cache = wide
    attn_prefill_sm90(dev, blocks or out, q, k_cache, v_cache, span)
