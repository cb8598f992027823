"""Prefill on one device, decode on another: the prompt's keys and values change hands by put-with-signal.

Both devices hold the whole model. The first runs the prompt and chooses the first id; then it puts the keys and values
of every layer, the rows that the prompt has filled, and the decode state {id, position, ids chosen so far}; the other
takes them into its own cache, and its decode steps, queued behind, go on from there. Nothing comes from the host: both
sides are graphs, captured once for each number of rows that is handed over. What belongs to the sequence has one owner
at a time, so the first device is free for the next prompt meanwhile: at most three hand-overs ahead of the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from qwen_raw.comm.signal import SignalChannel
from qwen_raw.config import FINE
from qwen_raw.device import Buffer, Graph
from qwen_raw.errors import UsageError, close_all
from qwen_raw.generation.runner import Progress
from qwen_raw.kernels.signal import Pieces
from qwen_raw.model.assembly import assemble
from qwen_raw.model.loading import CheckpointLike
from qwen_raw.model.rank import Rank
from qwen_raw.model.runner import DeviceRunner
from qwen_raw.model.state import KVCache


def layer_rows(cache: KVCache, rows: int) -> Iterator[Pieces]:
    """The first `rows` positions of every layer's keys, its values, and e4m3 keys' second parts; a piece a KV head.

    What else e4m3 needs comes from the weights, which both devices have.
    """
    for k, v, fine in cache.layers:
        KV, row = k.shape[0], k.shape[2] * k.dtype.itemsize
        for part in (k, v):
            yield Pieces(part, KV, rows * row, cache.max_len * row)
        if fine is not None:
            yield Pieces(fine, KV, rows * FINE, cache.max_len * FINE)


@dataclass(frozen=True, slots=True)
class CacheHandOver:
    """From one rank's cache to another's."""

    giver: Rank
    taker: Rank
    channel: SignalChannel

    @staticmethod
    def create(giver: Rank, taker: Rank, limit_ns: int) -> CacheHandOver:
        """For any number of rows that both caches have. `limit_ns`: how long one waits for the other."""
        largest = max(part.count * part.nbytes for part in layer_rows(giver.cache, _most(giver, taker)))
        channel = SignalChannel(giver.device, taker.device, max(largest, 16), limit_ns=limit_ns)
        return CacheHandOver(giver, taker, channel)

    @property
    def most(self) -> int:
        """Rows that both caches have."""
        return _most(self.giver, self.taker)

    def put(self, rows: int) -> None:
        """Queue on the giver: `rows` rows of every layer, and the decode state."""
        for part in layer_rows(self.giver.cache, rows):
            self.channel.put(part)
        self.channel.put(_state(self.giver))

    def take(self, rows: int) -> None:
        """Queue on the taker: the same."""
        for part in layer_rows(self.taker.cache, rows):
            self.channel.wait(part)
        self.channel.wait(_state(self.taker))

    def capture(self, rows: int) -> tuple[Graph, Graph]:
        """Both sides as graphs, the giver's first."""
        with self.giver.device.capture() as giving:
            self.put(rows)
        with self.taker.device.capture() as taking:
            self.take(rows)
        return giving.graph, taking.graph

    def nbytes(self, rows: int) -> int:
        """Of keys and values."""
        return sum(part.count * part.nbytes for part in layer_rows(self.giver.cache, rows))


def _most(giver: Rank, taker: Rank) -> int:
    return min(giver.cache.max_len, taker.cache.max_len)


def _state(rank: Rank) -> Buffer:
    return rank.decode.sampler.state


class TransferRunner(DeviceRunner):
    """Implements `qwen_raw.generation.runner.Runner` on two devices: one for prompts, one for decode steps.

    Arguments: DeviceRunner's, less `comm`.
    """

    def __init__(self, devices: Sequence[Any], checkpoint: CheckpointLike, **options: Any) -> None:
        if len(devices) != 2:
            raise UsageError(f"{len(devices)} devices: one computes prompts, the other decodes, as in --devices 0,1")
        self._hand_overs: dict[int, tuple[Graph, Graph]] = {}  # by rows
        super().__init__(devices, checkpoint, **options)

    def _assemble(
        self,
        checkpoint: CheckpointLike,
        fp8: bool,
        max_len: int,
        *,
        comm: str,
        limit_ns: int,
        progress: Progress | None,
    ) -> Sequence[Rank]:
        """See DeviceRunner. Each rank is a model of its own."""
        shared = self.devices[0].ordinal == self.devices[1].ordinal
        ranks = []
        for i, dev in enumerate(self.devices):
            half = None if progress is None else _half(progress, i)
            (rank,) = assemble([dev], checkpoint, fp8=fp8, max_len=max_len, kv=self.kv_dtype, progress=half)
            ranks.append(replace(rank, shares_gpu=shared))
        self.hand_over = CacheHandOver.create(ranks[0], ranks[1], limit_ns)
        return ranks

    @property
    def _prefilling(self) -> Sequence[Rank]:
        return self.ranks[:1]

    @property
    def _decoding(self) -> Sequence[Rank]:
        return self.ranks[1:]

    def _load(self) -> None:
        """See DeviceRunner; the step of each is loaded as one device's."""
        for rank in self.ranks:
            rank.decode.sampler.set_params(0.0, 0, self.text_vocab)
        super()._load()
        for rank in self.ranks:
            with rank.device.rehearsing():
                for _ in rank.step():
                    pass

    def rows(self, tokens: int) -> int:
        """How many rows are handed over for so many tokens: a prompt's bucket, or whole chunks."""
        buckets = self.prompt.buckets
        rows = self.prompt.bucket(tokens) if tokens <= buckets[-1] else -(-tokens // buckets[-1]) * buckets[-1]
        return min(rows, self.hand_over.most)

    def _prefill(self, ids: Sequence[int]) -> None:
        """See DeviceRunner. The count of ids goes on from where the other device's will be when it has ended."""
        rows = self.rows(len(ids))
        if rows not in self._hand_overs:  # before anything is queued
            self._hand_overs[rows] = self.hand_over.capture(rows)
            self._note_memory()
        _state(self.ranks[0]).upload(np.array([0, len(ids) - 1, self._launched, 0], np.int32))
        super()._prefill(ids)
        for graph in self._hand_overs[rows]:
            graph.launch()

    def _faults(self) -> list[str]:
        said = self.hand_over.channel.fault()
        return [*super()._faults(), *([said] if said else [])]

    def close(self) -> None:
        """See Runner."""
        graphs = [graph for pair in self._hand_overs.values() for graph in pair]
        self._hand_overs = {}
        close_all([*(graph.close for graph in graphs), super().close])


def _half(progress: Progress, i: int) -> Progress:
    """Progress of one of two models as part of both."""
    return lambda stage, done, total: progress(stage, done + i * total, 2 * total)
