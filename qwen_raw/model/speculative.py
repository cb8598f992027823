"""A DeviceRunner that speculates: the same ids, several a pass where guesses are right."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from qwen_raw.device import Device, Graph
from qwen_raw.errors import QwenRawError, UsageError, close_all
from qwen_raw.generation.runner import Progress
from qwen_raw.generation.speculation import AGAIN, Governor, PassCounts
from qwen_raw.kernels.accept import PassBuffers
from qwen_raw.kernels.gemv_rows import NoRoomError
from qwen_raw.model.assembly import assemble
from qwen_raw.model.loading import CheckpointLike
from qwen_raw.model.prompt import Prompt
from qwen_raw.model.runner import DeviceRunner
from qwen_raw.model.speculate import Drafter, ModelDrafter, NgramDrafter, Pass

PASSES_AHEAD = 1  # passes queued beyond the one that the host is waiting for


class SpeculativeRunner(DeviceRunner):
    """On one device. Passes replay as decode steps do; the host reads ids, and how many passes have ended."""

    def __init__(
        self,
        device: Device,
        checkpoint: CheckpointLike,
        *,
        guesses: int,
        draft: CheckpointLike | None = None,
        draft_fp8: bool = False,
        ngram: int | None = None,
        verify: str = "rows",
        governed: bool = True,
        max_model_len: int,
        text_vocab: int,
        progress: Progress | None = None,
        **options: Any,
    ) -> None:
        """`draft`: a checkpoint of the same vocabulary, in fp8 or bf16; else `ngram`. The rest is DeviceRunner's.

        `verify`: how the rows of a pass are computed, one of VERIFY (qwen_raw/model/speculate.py). `governed`: stop
        guessing while it does not pay (on a GPU).
        Raises UsageError for a draft model of another vocabulary, QwenRawError where the two do not fit.
        """
        self._rows, self.governed = guesses + 1, governed
        super().__init__(
            [device],
            checkpoint,
            max_model_len=max_model_len,
            text_vocab=text_vocab,
            spare=self._rows,
            progress=progress,
            **options,
        )
        rank = self.ranks[0]
        self._draft_prompt: Prompt | None = None
        buffers = PassBuffers.create(device, self._rows, max_model_len, self.config.V)
        drafter: Drafter
        if draft is not None:
            if text_vocab > draft.config.V:
                raise UsageError(f"the draft model knows {draft.config.V} ids, the model {text_vocab}")
            ranks = assemble([device], draft, fp8=draft_fp8, max_len=max_model_len + self._rows, progress=progress)
            self._draft_prompt = Prompt(ranks, captured=self._note_memory)
            self._draft_prompt.load()
            drafter = ModelDrafter(ranks[0], self._draft_prompt, text_vocab)
        elif ngram is not None:
            drafter = NgramDrafter(rank, ngram, buffers.no_draft)
        else:
            raise UsageError("speculation takes a draft model or n-grams")
        self._graphs: tuple[Graph, Graph] | None = self._start(drafter, verify, buffers)
        self._steps = 0  # passes queued that guessed nothing
        self._counted: PassCounts | None = None  # when it was closed
        self.cost = self._measure() if device.kind == "cuda" else None
        self._again = AGAIN if draft is None else None  # a draft model has no keys of what it did not see
        self._note_memory()

    def _start(self, drafter: Drafter, verify: str, buffers: PassBuffers) -> tuple[Graph, Graph]:
        """Make passes ready. Where products of several rows find no room (small multiprocessors), prefill's do."""
        try:
            self._pass = Pass.create(self.ranks[0], drafter, verify, buffers)
            return self._capture()
        except NoRoomError:
            if verify != "rows":
                raise
        return self._start(drafter, "chunk", buffers)

    def _capture(self) -> tuple[Graph, Graph]:
        """A pass and a step as graphs, their kernels loaded by ones that post nothing (the limit is step 0)."""
        device, graphs = self.devices[0], []
        self._pass.drafter.begin([0], 0.0, 0)
        self._pass.begin()
        for queue in (self._pass.queue, self._pass.queue_step):
            queue()
            device.synchronize()
            with device.capture() as capture:
                queue()
            graphs.append(capture.graph)
        return graphs[0], graphs[1]

    def _measure(self) -> float:
        """What a pass costs, in steps; by the host's clock, of passes that post nothing."""
        seconds = []
        for graph in self._live_graphs():
            for rounds in (2, 8):
                begin = time.perf_counter()
                for _ in range(rounds):
                    graph.launch()
                self.devices[0].synchronize()
                took = (time.perf_counter() - begin) / rounds
            seconds.append(took)
        return seconds[0] / seconds[1]

    @property
    def speculated(self) -> PassCounts:
        """See Runner: since the runner was made."""
        if self._counted is not None:
            return self._counted
        passes, _, right, guesses = (int(word) for word in self._pass.buffers.told.words)
        return PassCounts(passes, guesses, right, self._steps)

    def generate(self, ids: Sequence[int], *, max_tokens: int, temperature: float, seed: int) -> Iterator[int]:
        """See Runner. The first id is posted by prefill, the others by passes."""
        self._live_step()
        self._hash = None
        first, b, rank = self._launched, self._pass.buffers, self.ranks[0]
        end = first + max_tokens
        b.limit.upload(np.array([end], np.uint32))
        b.history.view((len(ids),)).upload(np.asarray(ids, np.int32))
        rank.decode.sampler.set_params(temperature, seed, self.text_vocab)
        self._pass.drafter.begin(ids, temperature, seed)
        rank.decode.sampler.set_position(0, len(ids) - 1)
        self.prompt.queue(ids)
        self._pass.begin()
        self._launched = first + 1
        queued, governor = self._ended(), Governor(self.cost if self.governed else None, self._again)
        try:
            for number in range(first, end):
                queued = self._queue_passes(governor, queued, number, end)
                self._first_reads += number == first
                yield self._read(number, position=len(ids) + number - first)
        finally:
            self.devices[0].synchronize()  # passes still queued end: how many ids they post is theirs to say
            self._launched = max(self._launched, int(b.told.words[1]))

    def _ended(self) -> int:
        """Passes that have ended, of all."""
        return int(self._pass.buffers.told.words[0])

    def _queue_passes(self, governor: Governor, queued: int, number: int, end: int) -> int:
        """Queue passes, so that id `number` will come and some work is ahead; how many have been queued, of all."""
        graphs, b = self._live_graphs(), self._pass.buffers
        ahead = PASSES_AHEAD if self.devices[0].kind == "cuda" else 0  # the simulator works while the host launches
        ended = self._ended()  # before the ids: a pass that ends in between counts as one that has not
        posted = max(self._launched, int(b.told.words[1]))
        while queued - ended < min(1 + ahead, end - posted) and posted - number < self._rows:
            counts = self.speculated
            if governor.guess(counts.guesses // (self._rows - 1), counts.right):
                graphs[0].launch()
            else:
                graphs[1].launch()
                self._steps += 1
            queued += 1
        return queued

    def replay_passes(self, context: int, passes: int) -> None:
        """Queue passes at position `context`, that cost what others do and post nothing: for benches."""
        rank = self.ranks[0]
        self._pass.buffers.limit.upload(np.array([0], np.uint32))
        rank.decode.sampler.set_position(0, context)
        self._pass.begin()
        for _ in range(passes):
            self._live_graphs()[0].launch()

    def _live_graphs(self) -> tuple[Graph, Graph]:
        if self._graphs is None:
            raise QwenRawError("this runner is closed")
        return self._graphs

    def close(self) -> None:
        """See Runner."""
        if self._graphs is None:
            return
        self._counted = self.speculated  # what it is read from goes with the device
        graphs, self._graphs = self._graphs, None
        drafts = [] if self._draft_prompt is None else [self._draft_prompt.close]
        close_all([*(graph.close for graph in graphs), *drafts, super().close])
