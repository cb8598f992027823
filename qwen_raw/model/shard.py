"""What one rank of a tensor-parallel model holds.

Column-parallel (a rank has some of the rows): Q, K, V, gate, up, LM head. Row-parallel (some of the columns): O, down.
Norms and the embedding are whole on every rank. Each rank's heads attend for themselves; the shares of O and of down
are summed over ranks, and nothing else of a layer is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from qwen_raw.config import ModelConfig


@dataclass(frozen=True)
class Shard:
    """Rank `rank` of `world` of the model `whole`; legal degrees are `ModelConfig.legal_tp`."""

    whole: ModelConfig
    rank: int = 0
    world: int = 1

    def _share(self, n: int) -> range:
        """This rank's part of n things; the parts differ by one at the most."""
        return range(n * self.rank // self.world, n * (self.rank + 1) // self.world)

    @cached_property
    def heads(self) -> range:
        """Query heads."""
        return self._share(self.whole.H)

    @cached_property
    def kv_heads(self) -> range:
        """Those that the query heads read: with fewer KV heads than ranks, one that other ranks hold too."""
        group = self.whole.group
        return range(self.heads.start // group, (self.heads.stop - 1) // group + 1)

    @cached_property
    def inner(self) -> range:
        """Of the MLP's inner width."""
        return self._share(self.whole.I)

    @cached_property
    def vocab(self) -> range:
        """Rows of the LM head, so ids whose logits this rank computes."""
        return self._share(self.whole.V)

    @cached_property
    def local(self) -> ModelConfig:
        """The dimensions that this rank computes with: its heads, its inner width, its rows of the LM head."""
        return replace(self.whole, H=len(self.heads), KV=len(self.kv_heads), I=len(self.inner), V=len(self.vocab))

    def head_rows(self, heads: range) -> range:
        """Rows (of Q, K, V) or columns (of O) that belong to these heads."""
        return range(heads.start * self.whole.HD, heads.stop * self.whole.HD)


def shards(config: ModelConfig, world: int) -> list[Shard]:
    """All ranks' shards."""
    return [Shard(config, rank, world) for rank in range(world)]
