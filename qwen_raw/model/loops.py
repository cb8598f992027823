"""Passes that follow each other on the device: graphs that repeat a pass, so that the host only reads ids.

A replay goes on until the request has all its ids, the host's ring is full, or the host asks for the end, because it
wants passes of another size or none. The next replay is queued before the one that is to end has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import chain

import numpy as np

from qwen_raw.device import Graph
from qwen_raw.errors import UnavailableError, close_all
from qwen_raw.kernels.loop import END, LOG, ROOM, LoopEnd, loop_again, loop_begin
from qwen_raw.kernels.peers import PollLimit
from qwen_raw.kernels.sample import SLOTS
from qwen_raw.model.speculate import STEP, Pass

QUEUED = 2  # replays that have not ended, at the most; below LOG


class PassLoops:
    """For passes of every size and for steps, a graph a rank."""

    def __init__(self, ends: Sequence[LoopEnd], graphs: dict[int, tuple[Graph, ...]]) -> None:
        """Loops are made by `create`."""
        self._ends, self._graphs = ends, graphs
        self.launched = 0
        self._pending: deque[tuple[int, int]] = deque()  # (number, guesses) of replays that may not have ended

    @staticmethod
    def create(passes: Sequence[Pass], sizes: Sequence[int]) -> PassLoops:
        """All kernels of passes must have been loaded. Raises UnavailableError, with the reason, where it cannot be."""
        devices = [each.rank.device for each in passes]
        if len(passes) > 1 and devices[0].kind == "sim":
            raise UnavailableError("the simulator has no loops of several ranks")
        meetings = [each.rank.decode.sampler.meeting for each in passes]
        limits = [PollLimit.create(dev, 0) if m is None else m.limit for dev, m in zip(devices, meetings, strict=True)]
        ends = LoopEnd.create_ranks(devices, limits)
        pairs = list(zip(passes, ends, strict=True))
        graphs = {guesses: tuple(_captured(each, end, guesses) for each, end in pairs) for guesses in (STEP, *sizes)}
        return PassLoops(ends, graphs)

    @property
    def current(self) -> int | None:
        """Guesses of the passes of the latest replay; None: it has ended, as have all before it."""
        return self._pending[-1][1] if self._pending else None

    @property
    def running(self) -> int:
        """Guesses of the passes of the earliest replay that may not have ended."""
        return self._pending[0][1] if self._pending else STEP

    @property
    def full(self) -> bool:
        """Whether no other replay may be queued yet."""
        return len(self._pending) >= QUEUED

    def launch(self, guesses: int) -> None:
        """Queue a replay on every rank; what was queued before it ends with the pass under way."""
        self.end()
        for graph in self._graphs[guesses]:
            graph.launch()
        self.launched += 1
        self._pending.append((self.launched, guesses))

    def end(self) -> None:
        """Ask all replays queued so far to end with the pass under way."""
        self._ends[0].asked.words[END] = self.launched

    def room(self, number: int) -> None:
        """The host has read all ids before step `number`."""
        self._ends[0].asked.words[ROOM] = number + SLOTS

    def ended(self) -> list[int]:
        """Guesses of each pass of the replays that have ended since the last time, in order."""
        told, found = self._ends[0].told.words, []
        while self._pending and int(told[0]) >= self._pending[0][0]:
            number, guesses = self._pending.popleft()
            found += [guesses] * int(told[1 + number % LOG])
        return found

    def close(self) -> None:
        """Destroy the graphs."""
        graphs, self._graphs = [*chain(*self._graphs.values())], {}
        close_all([graph.close for graph in graphs])


def _captured(each: Pass, end: LoopEnd, guesses: int) -> Graph:
    device, state, limit = each.rank.device, each.rank.decode.sampler.state, each.buffers.limit

    def begin(handle: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> None:
        loop_begin(device, end, handle, state, limit)

    def body(handle: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> None:
        for _ in each.queue(guesses):
            pass
        loop_again(device, end, handle, state, limit, guesses + 1, pdl=not each.rank.shares_gpu)

    return device.capture_loop(begin, body)
