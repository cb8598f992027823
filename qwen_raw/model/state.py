"""What a rank keeps on the device besides weights: KV cache, rope table, work buffers of decode and prefill.

H, KV, I and V are the rank's own (`Shard.local`); D is whole on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from qwen_raw.config import ModelConfig
from qwen_raw.device import BF16, E4M3, F32, I32, Buffer, Device
from qwen_raw.kernels import products
from qwen_raw.kernels.attn_decode import Workspace
from qwen_raw.kernels.kv_cache import fine_bytes
from qwen_raw.kernels.products import Products
from qwen_raw.kernels.sample import Sampler
from qwen_raw.model.kv_fp8 import KVFit
from qwen_raw.model.rope import rope_table
from qwen_raw.model.shard import Shard

CHUNK = 2048  # prompt tokens that prefill processes at a time
HEADER = 4  # words before the ids, which stay aligned to 16 bytes


@dataclass(frozen=True, slots=True)
class KVCache:
    """[L, 2, KV, max_len, HD] in one allocation, bf16 or e4m3; `k[l]` and `v[l]` are [KV, max_len, HD] views.

    `fine[l]`: what e4m3 needs besides (qwen_raw/kernels/kv_cache.py), else None. `wide`: room for one layer's e4m3 as
    bf16, where prefill wants it (qwen_raw/kernels/attention.py).
    """

    k: tuple[Buffer, ...]
    v: tuple[Buffer, ...]
    fine: tuple[Buffer | None, ...]
    max_len: int
    wide: tuple[Buffer, Buffer] | None = None

    @property
    def layers(self) -> Iterator[tuple[Buffer, Buffer, Buffer | None]]:
        """(k, v, fine) of each."""
        return zip(self.k, self.v, self.fine, strict=True)

    @staticmethod
    def create(dev: Device, c: ModelConfig, max_len: int, fits: Sequence[KVFit] | None = None) -> KVCache:
        """Zeroed, so that a masked key that is read all the same is a finite number. `fits`: e4m3, a layer each."""
        whole = dev.zeros((c.L, 2, c.KV, max_len, c.HD), E4M3 if fits else BF16)
        part = c.KV * max_len * c.HD
        views = [whole.view((c.KV, max_len, c.HD), i * part) for i in range(2 * c.L)]
        fine: list[Buffer | None] = [None] * c.L
        for index, fit in enumerate(fits or ()):
            fine[index] = buffer = dev.zeros((fine_bytes(c.KV, max_len, c.HD),), E4M3)
            tables = np.concatenate([fit.slots.reshape(-1), fit.pairs.reshape(-1)])
            buffer.view(tables.shape, buffer.shape[0] - tables.size).upload(tables)
        wide = None
        if fits and products.suits_sm90(dev.arch, c):
            wide = (dev.empty((c.KV, max_len, c.HD), BF16), dev.empty((c.KV, max_len, c.HD), BF16))
        return KVCache(tuple(views[0::2]), tuple(views[1::2]), tuple(fine), max_len, wide)


@dataclass(frozen=True, slots=True)
class DecodeBuffers:
    """One token's activations."""

    h: Buffer  # f32 [D] residual stream
    q: Buffer  # bf16 [H, HD]
    attn: Buffer  # bf16 [H·HD]
    act: Buffer  # bf16 [I]
    logits: Buffer  # f32 [V]
    workspace: Workspace
    sampler: Sampler

    @staticmethod
    def create(dev: Device, c: ModelConfig, max_len: int, sampler: Sampler) -> DecodeBuffers:
        return DecodeBuffers(
            h=dev.empty((c.D,), F32),
            q=dev.empty((c.H, c.HD), BF16),
            attn=dev.empty((c.H * c.HD,), BF16),
            act=dev.empty((c.I,), BF16),
            logits=dev.empty((c.V,), F32),
            workspace=Workspace.create(dev, c.H, c.KV, c.HD, max_len),
            sampler=sampler,
        )


@dataclass(frozen=True, slots=True)
class PrefillBuffers:
    """Activations of up to `chunk` rows: tokens of the prompt, and padding after them."""

    request: Buffer  # i32 [4 + chunk]: pos0, T, two unused words, the T ids; behind them ids of earlier prompts
    h: Buffer  # f32 [chunk, D] residual stream
    n: Buffer  # f16 [chunk, D] normalised; bf16 for the LM head; bf16 shares of a sum over ranks
    low: Buffer  # bf16 [chunk, D] what rounding took off n, for the LM head
    q: Buffer  # bf16 [chunk, H, HD]
    attn: Buffer  # bf16 [chunk, H, HD]
    act: Buffer  # bf16 [chunk, I]
    products: Products  # the kernels that this device multiplies with
    chunk: int

    @staticmethod
    def create(dev: Device, c: ModelConfig, max_len: int, *, fp8: bool, pdl: bool) -> PrefillBuffers:
        """`fp8`: of the weights; `pdl`: dependent launches."""
        T = min(CHUNK, max_len)
        return PrefillBuffers(
            request=dev.zeros((4 + T,), I32),
            h=dev.empty((T, c.D), F32),
            n=dev.empty((T, c.D), BF16),
            low=dev.empty((T, c.D), BF16),
            q=dev.empty((T, c.H, c.HD), BF16),
            attn=dev.zeros((T, c.H, c.HD), BF16),  # padding is never written
            act=dev.empty((T, c.I), BF16),
            products=products.create(dev, c, T, fp8=fp8, pdl=pdl),
            chunk=T,
        )

    @property
    def span(self) -> Buffer:
        """i32 [2]: {pos0, T}, the position of row 0 and how many rows are tokens. Kernels read it when they run."""
        return self.request.view((2,))

    def ids(self, rows: int) -> Buffer:
        """i32 [rows]: what is embedded; padding rows take whatever valid ids are there."""
        return self.request.view((rows,), HEADER)

    def put(self, ids: Sequence[int], pos0: int) -> None:
        """Upload the next chunk, in stream order: one copy of at most 8 KiB, which the host does not wait for."""
        words = np.zeros(HEADER + len(ids), np.int32)
        words[:2], words[HEADER:] = (pos0, len(ids)), ids
        self.request.view(words.shape).upload(words)


def device_rope_table(dev: Device, c: ModelConfig, max_len: int) -> Buffer:
    """f32 [max_len, HD/2, 2]: {cos, sin} of every position, angles computed in float64."""
    cos, sin = rope_table(c, np.arange(max_len))
    return dev.array(np.ascontiguousarray(np.stack([cos, sin], axis=-1), dtype=np.float32))


def state_bytes(c: ModelConfig, max_len: int, kv: str = "bf16", arch: str = "") -> int:
    """Device bytes of everything here, the small buffers left out. `kv`: type of the KV cache; `arch`: the device's."""
    T = min(CHUNK, max_len)
    row = c.D * 8 + 2 * c.H * c.HD * 2 + c.I * 2 + max(c.D, c.I, c.H * c.HD)  # the last: e4m3 inputs
    wide = 4 * c.KV * c.HD if kv == "fp8" and products.suits_sm90(arch, c) else 0
    return (c.kv_bytes_per_token(kv) + wide) * max_len + max_len * c.HD * 4 + T * row


def create_samplers(devices: Sequence[Device], shards: Sequence[Shard], limit_ns: int) -> list[Sampler]:
    """Every rank's sampler; at several ranks they choose together."""
    if len(devices) == 1:
        return [Sampler.create(devices[0], shards[0].whole.V)]
    return Sampler.create_ranks(devices, [shard.vocab for shard in shards], limit_ns=limit_ns)
