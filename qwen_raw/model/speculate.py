"""One speculative pass: guess ids, verify them all, keep those that were right. Nothing in it comes from the host.

A pass is captured once and replayed, like a decode step: id, position and history are in device memory, the guesses go
from kernel to kernel, and accept.cu moves the state on by as many ids as stood. So passes can be queued ahead too.
Work of several ranks is generators, run abreast by `qwen_raw.model.decode.level`.

My launches of draft.cu and accept.cu are ordinary ones, which wait for all that was queued before: a dependent launch
of the next step may read the position before its predecessor has ended (qwen_raw/kernels/attn_decode.py). Only the last
of a step is a dependent one: what follows it is an embedding, an ordinary one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from qwen_raw.device import F32, Buffer
from qwen_raw.kernels.accept import PassBuffers, accept, accept_begin, accept_step
from qwen_raw.kernels.draft import SharedGuesses, draft_catch, draft_ngram, draft_row, draft_share
from qwen_raw.model.decode import StepOptions, level
from qwen_raw.model.prompt import Prompt
from qwen_raw.model.rank import Rank
from qwen_raw.model.verify import ExactVerifier, RowsVerifier

UNCHOSEN = StepOptions(skip=frozenset({"sample"}))
FILL = StepOptions(skip=frozenset({"head", "sample"}))  # keys and values only
STEP, LIMITED = 0, -1  # passes without guesses: as decode's, and one that posts nothing from the limit on
EXACT_BYTES = 32 << 20  # weights of a step, on one rank, that L2 keeps from one kernel to its next launch
CATCH = 64  # ids at a time whose keys a draft model is given after steps without guesses


class Drafter(Protocol):
    """Where guesses come from, on one rank."""

    @property
    def state(self) -> Buffer:
        """i32 [4]: what accept.cu is to bring to the target's id and position."""

    @property
    def vocab(self) -> int:
        """Ids from here on are unknown to it."""

    def begin(self, ids: Sequence[int], temperature: float, seed: int, *, late: bool = False) -> None:
        """Queue what a new prompt needs. `late`: but for the prompt itself, which catch_up will bring."""

    def queue(self, target: Buffer, b: PassBuffers) -> None:
        """Queue the guesses: b.ids, and the ids of b.rows. `target`: the target's decode state."""

    def catch_up(self, target: Buffer, b: PassBuffers) -> None:
        """Queue what it missed of up to CATCH ids that were chosen without guesses."""


@dataclass(frozen=True, slots=True)
class NgramDrafter:
    """Prompt lookup: what followed the latest earlier run of up to N ids like the last ones. Every rank for itself."""

    rank: Rank
    N: int
    state: Buffer  # nobody's

    @property
    def vocab(self) -> int:
        """See Drafter."""
        return self.rank.shard.whole.V

    def begin(self, ids: Sequence[int], temperature: float, seed: int, *, late: bool = False) -> None:
        """Nothing: the history is accept.cu's."""

    def queue(self, target: Buffer, b: PassBuffers) -> None:
        """See Drafter."""
        draft_ngram(self.rank.device, b.ids, b.rows, target, b.history, self.N)

    def catch_up(self, target: Buffer, b: PassBuffers) -> None:
        """Nothing: all ids are in the history."""


@dataclass(frozen=True, slots=True)
class ModelDrafter:
    """A smaller model on rank 0's device and stream.

    It draws with the target's seed: at a temperature, two similar distributions then mostly choose the same id.
    """

    rank: Rank
    prompt: Prompt
    text_vocab: int  # of the target

    @property
    def state(self) -> Buffer:
        """See Drafter."""
        return self.rank.decode.sampler.state

    @property
    def vocab(self) -> int:
        """See Drafter."""
        return self.rank.shard.whole.V

    def begin(self, ids: Sequence[int], temperature: float, seed: int, *, late: bool = False) -> None:
        """See Drafter. Its own first id is chosen too, and not used. An id that it does not know is its id 0."""
        self.rank.decode.sampler.set_params(temperature, seed, min(self.text_vocab, self.vocab))
        if late:
            return
        self.rank.decode.sampler.set_position(0, len(ids) - 1)
        self.prompt.queue([token if token < self.vocab else 0 for token in ids])

    def queue(self, target: Buffer, b: PassBuffers) -> None:
        """See Drafter. A step more than there are guesses: if all are right, the last one's keys are needed too."""
        M = b.ids.shape[0]
        draft_row(self.rank.device, b.ids, b.rows, 0, target)
        for i in range(1, M):
            level([self.rank.step()])
            draft_row(self.rank.device, b.ids, b.rows, i, self.state)
        level([self.rank.step(FILL)])

    def catch_up(self, target: Buffer, b: PassBuffers) -> None:
        """See Drafter."""
        p = self.rank.prefill
        rows = min(CATCH, p.chunk)
        draft_catch(self.rank.device, target, b.filled, b.history, p.request.view((4 + rows,)), self.vocab)
        level([self.rank.prefill_chunk(rows)])


def verify_by_chunk(rank: Rank, b: PassBuffers, logits: Buffer) -> Iterator[None]:
    """logits f32 [M, V] after every row, by prefill's kernels: weights are read once; not decode's bits.

    Only for passes of as many rows as the buffers have: b.span says so many.
    """
    prefill = replace(rank.prefill, request=b.request, products=rank.prefill.products.unquantised())
    alike = replace(rank, prefill=prefill)
    M = logits.shape[0]
    yield from alike.prefill_chunk(M)
    alike.logits(M, logits)


Verify = Callable[[PassBuffers, Buffer], Iterator[None]]


# By name, for a rank and M rows: what queues the logits of a pass. "exact" has the bits of single steps; "chunk" is for
# devices without room for "rows".
VERIFY: dict[str, Callable[[Rank, int], Verify]] = {
    "rows": lambda rank, M: RowsVerifier.create(rank, M).queue,
    "exact": lambda rank, M: ExactVerifier.create(rank, M).queue,
    "chunk": lambda rank, _: partial(verify_by_chunk, rank),
}


def usual_verify(ranks: Sequence[Rank]) -> str:
    """ "exact" where the weights of a step are so few that rows would cost as much, else "rows".

    By the model's size alone, not by times, which differ from run to run: a near-tie must not be decided by them.
    """
    return "exact" if max(rank.weights.bytes_per_token for rank in ranks) <= EXACT_BYTES else "rows"


@dataclass(frozen=True, slots=True)
class Pass:
    """Everything of passes on one rank. `shared`: where rank 0's guesses reach the others; None: each has its own."""

    rank: Rank
    buffers: PassBuffers
    drafter: Drafter | None  # None: the guesses are rank 0's
    shared: SharedGuesses | None
    verify: dict[int, Verify]  # by rows
    logits: Buffer  # f32 [R, V of this rank]

    @staticmethod
    def create(
        rank: Rank,
        drafter: Drafter | None,
        verify: str,
        buffers: PassBuffers,
        guesses: Sequence[int],
        shared: SharedGuesses | None = None,
    ) -> Pass:
        """With logits of its own. `verify`: one of VERIFY; `guesses`: how many a pass may have."""
        logits = rank.device.empty((buffers.most, rank.shard.local.V), F32)
        return Pass(rank, buffers, drafter, shared, {k + 1: VERIFY[verify](rank, k + 1) for k in guesses}, logits)

    @property
    def _draft(self) -> tuple[Buffer, int]:
        """(state, vocabulary) of what guesses."""
        if self.drafter is None:
            return self.buffers.no_draft, self.rank.shard.whole.V
        return self.drafter.state, self.drafter.vocab

    def begin(self) -> None:
        """Queue, after the first id of a request has been chosen, what the first pass reads."""
        accept_begin(self.rank.device, self.buffers, self.rank.decode.sampler, *self._draft)

    def queue(self, guesses: int) -> Iterator[None]:
        """Queue a pass of so many guesses, or without: STEP or LIMITED."""
        rank, sampler, (draft, vocab) = self.rank, self.rank.decode.sampler, self._draft
        V = rank.shard.local.V
        if guesses == STEP:
            yield from rank.step()
            accept_step(rank.device, self.buffers, sampler, draft, vocab, pdl=not rank.shares_gpu)
            return
        if guesses == LIMITED:
            logits = rank.decode.logits.view((1, V))
            yield from rank.step(UNCHOSEN)
        else:
            b, logits = self.buffers.first(guesses + 1), self.logits.view((guesses + 1, V))
            if self.drafter is not None:
                self.drafter.queue(sampler.state, b)
            if self.shared is not None:
                draft_share(rank.device, b.ids, b.rows, self.shared)
            yield from self.verify[guesses + 1](b, logits)
        accept(rank.device, self.buffers, sampler, draft, logits, vocab)

    def catch_up(self) -> None:
        """Queue what lets a drafter guess again after passes that did not."""
        if self.drafter is not None:
            self.drafter.catch_up(self.rank.decode.sampler.state, self.buffers)
