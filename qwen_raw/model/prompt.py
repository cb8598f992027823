"""Prefill by replay: a prompt becomes one captured graph, chosen by its length, or a few in a row.

Lengths fall into buckets (16, 24, 32, 48, 64, … 2048); a prompt runs as the smallest that holds it, padded. What is
longer than the largest goes through that one in chunks, the rest through the bucket that holds it. The graph of the
last chunk ends with the LM head on the last token and the choice of the first id, so the host uploads ids, launches,
and reads one id. Graphs are captured when a bucket is first used, and kept: one a bucket and one more at the most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from qwen_raw.device import Graph
from qwen_raw.errors import close_all
from qwen_raw.model.decode import level
from qwen_raw.model.rank import Rank

SMALLEST = 16


def buckets(chunk: int) -> tuple[int, ...]:
    """Powers of two and the midpoints between them from 16 on, below `chunk`; and `chunk`, the most rows at a time."""
    powers = [SMALLEST << i for i in range(max(0, (chunk // SMALLEST).bit_length()))]
    return (*(rows for power in powers for rows in (power, power * 3 // 2) if rows < chunk), chunk)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Part of a prompt, and how it is run."""

    ids: Sequence[int]
    pos0: int
    rows: int  # the bucket
    last: bool  # followed by the choice of an id


class Prompt:
    """The prefill of all ranks. Work is queued on their streams; nothing here waits for it."""

    def __init__(self, ranks: Sequence[Rank], *, captured: Callable[[], None] = lambda: None) -> None:
        """`captured` is called when graphs have been added."""
        self._ranks = tuple(ranks)
        self.buckets = buckets(ranks[0].prefill.chunk)
        self._captured = captured
        self._capturable = all(rank.residual.capturable for rank in ranks)
        self.graphs: dict[tuple[int, bool], tuple[Graph, ...]] = {}  # by (bucket, last): one a rank

    def load(self) -> None:
        """Load every kernel of every bucket: a layer of each is rehearsed. Captures and ranks that wait need it."""
        for rank in self._ranks:
            with rank.device.rehearsing():
                for rows in self.buckets:
                    level([rank.prefill_chunk(rows, skip=frozenset({"reduce"}), layers=1)])
                rank.choose_first(self.buckets[0])

    def bucket(self, tokens: int) -> int:
        """The rows as which so many tokens are run, at most a chunk."""
        return next(rows for rows in self.buckets if rows >= tokens)

    def chunks(self, ids: Sequence[int]) -> list[Chunk]:
        """How a prompt is cut."""
        most = self.buckets[-1]
        parts = [(pos0, ids[pos0 : pos0 + most]) for pos0 in range(0, len(ids), most)]
        return [Chunk(part, pos0, self.bucket(len(part)), pos0 + most >= len(ids)) for pos0, part in parts]

    def queue(self, ids: Sequence[int]) -> None:
        """Queue all ids through the layers of all ranks, and the choice of the id that follows."""
        chunks = self.chunks(ids)
        for chunk in chunks:  # before anything is queued: no rank waits for one whose graph is being made
            self._capture(chunk.rows, chunk.last)
        for chunk in chunks:
            for rank in self._ranks:
                rank.prefill.put(chunk.ids, chunk.pos0)
            for graph in self.graphs.get((chunk.rows, chunk.last), ()):
                graph.launch()
            if not self._capturable:
                level([rank.prefill_chunk(chunk.rows, choose=chunk.last) for rank in self._ranks])

    def _capture(self, rows: int, last: bool) -> None:
        """Capture these graphs, unless they are there or the sums over ranks cannot be captured."""
        if self._capturable and (rows, last) not in self.graphs:
            self.graphs[rows, last] = tuple(rank.capture_prefill(rows, choose=last) for rank in self._ranks)
            self._captured()

    def close(self) -> None:
        """Destroy the graphs and let go of the ranks; raises the first failure of queued work, after all are closed."""
        graphs, self.graphs, self._ranks = self.graphs, {}, ()
        close_all([graph.close for ranks in graphs.values() for graph in ranks])
