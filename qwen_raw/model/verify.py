"""The verification of a speculative pass: logits after each of M ids, in one run through the weights.

A decode step for M rows: the same launches, with products of include/gemv_rows.cuh and attention of M tokens, or with
those of include/gemv_each.cuh and attention of each token by itself, which have the bits of single steps. Ids and the
position of the first are read from device memory; keys and values of all M positions are appended. At several ranks O
and down leave shares that are summed over ranks, and a rank has the logits of its rows of the LM head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from qwen_raw.config import ModelConfig
from qwen_raw.device import Buffer, Device
from qwen_raw.kernels.accept import PassBuffers
from qwen_raw.kernels.attn_decode import Workspace, attn_decode, attn_decode_each, takes_each
from qwen_raw.kernels.embed import embed
from qwen_raw.kernels.gemm_sm90 import Tokens
from qwen_raw.kernels.gemv_each_bf16 import GEMV_EACH as EACH_BF16
from qwen_raw.kernels.gemv_each_fp8 import GEMV_EACH as EACH_FP8
from qwen_raw.kernels.gemv_rows import GemvRows, RowsWorkspace
from qwen_raw.kernels.gemv_rows_bf16 import GEMV_ROWS as ROWS_BF16
from qwen_raw.kernels.gemv_rows_fp8 import GEMV_ROWS as ROWS_FP8
from qwen_raw.kernels.linear import Linear
from qwen_raw.model.rank import Rank

LEAST_SPLIT = 2048  # of a row, what one block can take of it with 16 rows: what the workspace's size follows from


def workspace_sums(c: ModelConfig, M: int) -> int:
    """The most partial sums, over all products of M rows, that splits of a row leave."""
    shapes = ((c.D, c.I), (2 * c.I, c.D), ((c.H + 2 * c.KV) * c.HD, c.D), (c.V, c.D), (c.D, c.H * c.HD))
    return max((K // LEAST_SPLIT + 1) * M * N for N, K in shapes)


@dataclass(frozen=True, slots=True)
class RowParallel:
    """O and down for several rows, as qwen_raw/kernels/products.py's RowProducts."""

    rows: GemvRows
    workspace: RowsWorkspace
    pdl: bool

    def add(self, dev: Device, h: Buffer, x: Tokens, w: Linear) -> None:
        """See RowProducts."""
        self.rows.add(dev, h, x.values, w, self.workspace, pdl=self.pdl)

    def store(self, dev: Device, y: Buffer, x: Tokens, w: Linear) -> None:
        """See RowProducts."""
        self.rows.store(dev, y, x.values, w, self.workspace, pdl=self.pdl)


@dataclass(frozen=True, slots=True)
class RowsVerifier:
    """For one rank and M rows; activations are the prefill's, whose work is never under way at the same time."""

    rank: Rank
    M: int
    attention: Workspace
    products: RowsWorkspace

    @staticmethod
    def create(rank: Rank, M: int) -> RowsVerifier:
        """With workspaces of its own."""
        c, dev = rank.shard.local, rank.device
        sums = workspace_sums(c, M)
        attention = Workspace.create(dev, c.H, c.KV, c.HD, rank.cache.max_len, T=M)
        return RowsVerifier(rank, M, attention, RowsWorkspace.create(dev, sums))

    def queue(self, b: PassBuffers, logits: Buffer) -> Iterator[None]:
        """logits f32 [M, V of this rank] after every row of b.ids, whose first is at b.span's position.

        Yields after every sum over ranks (`qwen_raw.model.decode.level`). The embedding is an ordinary launch:
        attention, a dependent one, reads the position before its predecessor ends.
        """
        rank, M, ws = self.rank, self.M, self.products
        dev, c, w, p, residual = rank.device, rank.shard.local, rank.weights, rank.prefill, rank.residual
        h, q, attn, share = (x.view((M, *x.shape[1:])) for x in (p.h, p.q, p.attn, p.n))
        act, pos, pdl = p.act.view((M, c.I)), b.span.view((1,)), not rank.shares_gpu
        rows: GemvRows = ROWS_FP8 if w.fp8 else ROWS_BF16
        parallel = RowParallel(rows, ws, pdl)
        embed(dev, h, w.embed, b.ids)
        for layer, (k, v, fine) in zip(w.layers, rank.cache.layers, strict=True):
            bias, rope, eps = layer.qkv_bias, rank.rope, c.rms_eps
            rows.qkv(dev, q, k, v, h, layer.norm1, layer.qkv, bias, rope, pos, eps, ws, fine=fine, pdl=pdl)
            attn_decode(dev, attn, q, k, v, pos, self.attention, fine=fine, pdl=pdl)
            residual.products(parallel, h, Tokens(attn.view((M, c.H * c.HD))), layer.o, share)
            residual.reduce(h, pdl=pdl, spare=share)
            yield
            rows.swiglu(dev, act, h, layer.norm2, layer.gate, layer.up, eps, ws, pdl=pdl)
            residual.products(parallel, h, Tokens(act), layer.down, share)
            residual.reduce(h, pdl=pdl, spare=share)
            yield
        ROWS_BF16.logits(dev, logits, h, w.norm, w.head, c.rms_eps, ws, pdl=pdl)


@dataclass(frozen=True, slots=True)
class ExactVerifier:
    """RowsVerifier's, with the bits of M single steps."""

    rank: Rank
    M: int
    attention: Workspace | None  # None: a launch a token, in decode's workspace

    @staticmethod
    def create(rank: Rank, M: int) -> ExactVerifier:
        """With a workspace of its own, split as decode's."""
        c, split = rank.shard.local, rank.decode.workspace.split
        if not takes_each(c.H, c.KV):
            return ExactVerifier(rank, M, None)
        ws = Workspace.create(rank.device, c.H, c.KV, c.HD, rank.cache.max_len, split=split, each=M)
        return ExactVerifier(rank, M, ws)

    def queue(self, b: PassBuffers, logits: Buffer) -> Iterator[None]:
        """See RowsVerifier."""
        rank, M = self.rank, self.M
        dev, c, w, p, residual = rank.device, rank.shard.local, rank.weights, rank.prefill, rank.residual
        h, q, attn, share = (x.view((M, *x.shape[1:])) for x in (p.h, p.q, p.attn, p.n))
        act, pos, pdl = p.act.view((M, c.I)), b.span.view((1,)), not rank.shares_gpu
        each = EACH_FP8 if w.fp8 else EACH_BF16
        flat = attn.view((M, c.H * c.HD))
        embed(dev, h, w.embed, b.ids)
        for number, (layer, (k, v, fine)) in enumerate(zip(w.layers, rank.cache.layers, strict=True)):
            tables = (layer.qkv_bias, rank.rope, pos)
            each.qkv(dev, q, k, v, h, layer.norm1, layer.qkv, *tables, c.rms_eps, fine=fine, pdl=pdl)
            self._attend(b, attn, q, k, v, fine, pdl)
            residual.each(each, h, flat, layer.o, share, number=2 * number, pdl=pdl)
            yield
            each.swiglu(dev, act, h, layer.norm2, layer.gate, layer.up, c.rms_eps, pdl=pdl)
            residual.each(each, h, act, layer.down, share, number=2 * number + 1, pdl=pdl)
            yield
        EACH_BF16.logits(dev, logits, h, w.norm, w.head, c.rms_eps, pdl=pdl)

    def _attend(
        self, b: PassBuffers, out: Buffer, q: Buffer, k: Buffer, v: Buffer, fine: Buffer | None, pdl: bool
    ) -> None:
        dev, pos = self.rank.device, b.span.view((1,))
        if self.attention is not None:
            attn_decode_each(dev, out, q, k, v, pos, self.attention, fine=fine, pdl=pdl)
            return
        row = q.shape[1:]
        for i in range(self.M):  # ordinary launches: a token sees keys that the launch before has written
            place = i * row[0] * row[1]
            one, ws = b.rows.view((1,), 4 * i + 1), self.rank.decode.workspace
            attn_decode(dev, out.view(row, place), q.view(row, place), k, v, one, ws, fine=fine)
