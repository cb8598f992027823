"""One speculative pass: guess ids, verify them all, keep those that were right. Nothing in it comes from the host.

A pass is captured once and replayed, like a decode step: id, position and history are in device memory, the guesses go
from kernel to kernel, and accept.cu moves the state on by as many ids as stood. So passes can be queued ahead too.

My launches of draft.cu and accept.cu are ordinary ones, which wait for all that was queued before: a dependent launch
of the next step may read the position before its predecessor has ended (qwen_raw/kernels/attn_decode.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from qwen_raw.device import F32, Buffer
from qwen_raw.kernels.accept import PassBuffers, accept, accept_begin
from qwen_raw.kernels.draft import draft_ngram, draft_row
from qwen_raw.model.decode import StepOptions, level
from qwen_raw.model.prompt import Prompt
from qwen_raw.model.rank import Rank
from qwen_raw.model.verify import RowsVerifier

APART = StepOptions(skip=frozenset({"sample"}), pdl=False)  # a row: its logits, and the state as it was
STEP = StepOptions(skip=frozenset({"sample"}))
FILL = StepOptions(skip=frozenset({"head", "sample"}))  # keys and values only


class Drafter(Protocol):
    """Where guesses come from."""

    @property
    def state(self) -> Buffer:
        """i32 [4]: what accept.cu is to bring to the target's id and position."""

    def begin(self, ids: Sequence[int], temperature: float, seed: int) -> None:
        """Queue what a new prompt needs."""

    def queue(self, target: Buffer, b: PassBuffers) -> None:
        """Queue the guesses: b.ids, and the ids of b.rows. `target`: the target's decode state."""


@dataclass(frozen=True, slots=True)
class NgramDrafter:
    """Prompt lookup: what followed the latest earlier run of up to N ids like the last ones."""

    rank: Rank
    N: int
    state: Buffer  # nobody's

    def begin(self, ids: Sequence[int], temperature: float, seed: int) -> None:
        """Nothing: the history is accept.cu's."""

    def queue(self, target: Buffer, b: PassBuffers) -> None:
        """See Drafter."""
        draft_ngram(self.rank.device, b.ids, b.rows, target, b.history, self.N)


@dataclass(frozen=True, slots=True)
class ModelDrafter:
    """A smaller model on the same device and stream.

    It draws with the target's seed: at a temperature, two similar distributions then mostly choose the same id.
    """

    rank: Rank
    prompt: Prompt
    text_vocab: int

    @property
    def state(self) -> Buffer:
        """See Drafter."""
        return self.rank.decode.sampler.state

    def begin(self, ids: Sequence[int], temperature: float, seed: int) -> None:
        """See Drafter. Its own first id is chosen too, and not used."""
        self.rank.decode.sampler.set_params(temperature, seed, self.text_vocab)
        self.rank.decode.sampler.set_position(0, len(ids) - 1)
        self.prompt.queue(ids)

    def queue(self, target: Buffer, b: PassBuffers) -> None:
        """See Drafter. A step more than there are guesses: if all are right, the last one's keys are needed too."""
        M = b.ids.shape[0]
        draft_row(self.rank.device, b.ids, b.rows, 0, target)
        for i in range(1, M):
            level([self.rank.step()])
            draft_row(self.rank.device, b.ids, b.rows, i, self.state)
        level([self.rank.step(FILL)])


def verify_by_steps(rank: Rank, b: PassBuffers, logits: Buffer) -> None:
    """logits f32 [M, V] after every row, by a decode step a row: bit for bit what single steps compute.

    It reads all weights M times, so it is a reference, not a speed-up.
    """
    M, V = logits.shape
    for i in range(M):
        sampler = replace(rank.decode.sampler, state=b.rows.view((4,), 4 * i))
        decode = replace(rank.decode, sampler=sampler, logits=logits.view((V,), i * V))
        level([replace(rank, decode=decode).step(APART)])


def verify_by_chunk(rank: Rank, b: PassBuffers, logits: Buffer) -> None:
    """logits f32 [M, V] after every row, by prefill's kernels: weights are read once; not decode's bits."""
    prefill = replace(rank.prefill, request=b.request, products=rank.prefill.products.unquantised())
    alike = replace(rank, prefill=prefill)
    M = logits.shape[0]
    level([alike.prefill_chunk(M)])
    alike.logits(M, logits)


Verify = Callable[[PassBuffers, Buffer], None]


def _by_rows(rank: Rank, M: int) -> Verify:
    return RowsVerifier.create(rank, M).queue


# By name, for a rank and M rows: what queues the logits of a pass. "rows" is the fastest.
VERIFY: dict[str, Callable[[Rank, int], Verify]] = {
    "rows": _by_rows,
    "chunk": lambda rank, _: partial(verify_by_chunk, rank),
    "steps": lambda rank, _: partial(verify_by_steps, rank),
}


@dataclass(frozen=True, slots=True)
class Pass:
    """Everything of a pass on one rank."""

    rank: Rank
    buffers: PassBuffers
    drafter: Drafter
    verify: Verify
    logits: Buffer  # f32 [M, V]

    @staticmethod
    def create(rank: Rank, drafter: Drafter, verify: str, buffers: PassBuffers) -> Pass:
        """With logits of its own. `verify`: one of VERIFY."""
        M = buffers.ids.shape[0]
        logits = rank.device.empty((M, rank.shard.whole.V), F32)
        return Pass(rank, buffers, drafter, VERIFY[verify](rank, M), logits)

    def begin(self) -> None:
        """Queue, after the first id of a request has been chosen, what the first pass reads."""
        accept_begin(self.rank.device, self.buffers, self.rank.decode.sampler, self.drafter.state)

    def queue(self) -> None:
        """Queue one pass."""
        sampler = self.rank.decode.sampler
        self.drafter.queue(sampler.state, self.buffers)
        self.verify(self.buffers, self.logits)
        accept(self.rank.device, self.buffers, sampler, self.drafter.state, self.logits)

    def queue_step(self) -> None:
        """Queue a pass that guesses nothing: a decode step, and accept.cu for the state of the next pass."""
        rank = self.rank
        level([rank.step(STEP)])
        logits = rank.decode.logits.view((1, rank.shard.whole.V))
        accept(rank.device, self.buffers, rank.decode.sampler, self.drafter.state, logits)
