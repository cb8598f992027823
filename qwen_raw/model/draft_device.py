"""A draft model on a device of its own: a stream on any GPU, that of a rank too.

Of a pass that guesses, rank 0 and the draft's device each queue their part, a graph each, and nothing comes from the
host: the parts meet by put-with-signal (qwen_raw/comm/signal.py).

    rank 0         put {id, position} · take the guesses · share them with the other ranks · verify · accept
    draft's device take {id, position} · guess, a step each · put the guesses · one more step, for the last one's keys

So the draft model begins as soon as the ids of the pass before are known on rank 0, its last step runs beside the
verification, and only the draft's GPU and rank 0's need a way to each other. Passes without guesses concern rank 0
alone; the ids that the draft model has missed come as one payload, which its prefill takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qwen_raw.comm.signal import SignalChannel
from qwen_raw.device import I32, Buffer, Device, Graph
from qwen_raw.kernels.accept import MAX_ROWS, PassBuffers
from qwen_raw.kernels.draft import HEADER, draft_catch, draft_row, draft_rows
from qwen_raw.model.decode import level
from qwen_raw.model.speculate import CATCH, FILL, ModelDrafter

PACK = 4  # ids in 16 bytes, what channels count in
LEAST_LENGTH = PACK  # of the draft's cache: a payload of missed ids is whole packs


@dataclass(frozen=True, slots=True)
class DraftLink:
    """Both ways between rank 0's device and the draft's, and where payloads lie."""

    target: Device
    draft: Device
    ranks: int  # of the target
    there: SignalChannel  # to the draft model: {id, position}, or ids that it has missed
    back: SignalChannel  # its guesses
    state: Buffer  # rank 0: i32 [4] id, position, two zeros
    missed: Buffer  # rank 0: i32 [4 + CATCH] a request of prefill
    guesses: Buffer  # rank 0: i32 [16] the first is nobody's
    ids: Buffer  # draft: i32 [16] the same
    rows: Buffer  # draft: i32 [16, 4] nobody's

    @staticmethod
    def create(target: Device, draft: Device, ranks: int, limit_ns: int) -> DraftLink:
        """Tried in both directions, where these are two GPUs. `limit_ns`: how long one waits for the other.

        Raises QwenRawError for a pair without a peer path, or one that loses what crosses the link.
        """
        return DraftLink(
            target,
            draft,
            ranks,
            SignalChannel(target, draft, 4 * (HEADER + CATCH), ranks=(0, ranks), limit_ns=limit_ns),
            SignalChannel(draft, target, 4 * MAX_ROWS, ranks=(ranks, 0), limit_ns=limit_ns),
            target.zeros((4,), I32),
            target.zeros((HEADER + CATCH,), I32),
            target.zeros((MAX_ROWS,), I32),
            draft.zeros((MAX_ROWS,), I32),
            draft.zeros((MAX_ROWS, 4), I32),
        )

    def fault(self) -> str | None:
        """After a launch has failed: who waited for whom in vain."""
        said = self.there.fault() or self.back.fault()
        return None if said is None else said.replace(f"rank {self.ranks}", "the draft model")


@dataclass(frozen=True, slots=True)
class DistantDrafter:
    """A draft model at the other end of a link: a Drafter on rank 0, and the draft device's part of each pass."""

    model: ModelDrafter
    link: DraftLink

    @property
    def state(self) -> Buffer:
        """See Drafter: rank 0's copy, which is handed over."""
        return self.link.state

    @property
    def vocab(self) -> int:
        """See Drafter."""
        return self.model.vocab

    def begin(self, ids: Sequence[int], temperature: float, seed: int, *, late: bool = False) -> None:
        """See Drafter; all of it on the draft's device."""
        self.model.begin(ids, temperature, seed, late=late)

    def queue(self, target: Buffer, b: PassBuffers) -> None:
        """See Drafter: rank 0's part."""
        M, link = b.ids.shape[0], self.link
        link.there.put(link.state)
        link.back.wait(link.guesses.view((_packs(M),)))
        draft_rows(link.target, b.ids, b.rows, target, link.guesses)

    def guess(self, guesses: int) -> None:
        """Queue on the draft's device, its part of a pass: see ModelDrafter.queue, whose ids these are."""
        rank, link, state = self.model.rank, self.link, self.model.state
        M = guesses + 1
        ids, rows = link.ids.view((M,)), link.rows.view((M, 4))
        link.there.wait(state)
        for i in range(1, M):
            level([rank.step()])
            draft_row(link.draft, ids, rows, i, state)
        link.back.put(link.ids.view((_packs(M),)))
        level([rank.step(FILL)])

    @property
    def catch(self) -> int:
        """Missed ids that are handed over at a time."""
        return min(CATCH, self.model.rank.prefill.chunk) // PACK * PACK

    def catch_up(self, target: Buffer, b: PassBuffers) -> None:
        """See Drafter: rank 0's part."""
        link, missed = self.link, self.link.missed.view((HEADER + self.catch,))
        draft_catch(link.target, target, b.filled, b.history, missed, self.vocab)
        link.there.put(missed)

    def fill(self) -> None:
        """Queue on the draft's device, its part of catch_up: the keys of what rank 0 hands over."""
        prefill = self.model.rank.prefill
        self.link.there.wait(prefill.request.view((HEADER + self.catch,)))
        level([self.model.rank.prefill_chunk(self.catch)])

    def load(self, sizes: Sequence[int]) -> None:
        """Load every kernel of the draft device's parts of passes of so many guesses."""
        with self.link.draft.rehearsing():
            for guesses in sizes:
                self.guess(guesses)
            self.fill()
        self.link.draft.synchronize()

    def capture(self, guesses: int) -> Graph:
        """`guess` as a graph."""
        with self.link.draft.capture() as capture:
            self.guess(guesses)
        return capture.graph

    def capture_fill(self) -> Graph:
        """`fill` as a graph."""
        with self.link.draft.capture() as capture:
            self.fill()
        return capture.graph


def _packs(ids: int) -> int:
    """So many ids, rounded up to whole packs."""
    return -(-ids // PACK) * PACK
