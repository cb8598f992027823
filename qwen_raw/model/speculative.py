"""A DeviceRunner that speculates: the same ids, several a pass where guesses are right."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from qwen_raw.device import Device, Graph
from qwen_raw.errors import QwenRawError, UnavailableError, UsageError, close_all
from qwen_raw.generation.runner import Progress
from qwen_raw.generation.speculation import Governor, PassCounts, pass_sizes
from qwen_raw.kernels.accept import PassBuffers
from qwen_raw.kernels.draft import SharedGuesses
from qwen_raw.kernels.gemv_rows import NoRoomError
from qwen_raw.kernels.peers import ranks_on_gpu
from qwen_raw.model.assembly import LIMIT_NS, assemble
from qwen_raw.model.draft_device import LEAST_LENGTH, DistantDrafter, DraftLink
from qwen_raw.model.loading import CheckpointLike
from qwen_raw.model.loops import PassLoops
from qwen_raw.model.prompt import Prompt
from qwen_raw.model.runner import AHEAD, DeviceRunner
from qwen_raw.model.speculate import (
    CATCH,
    LIMITED,
    STEP,
    Drafter,
    ModelDrafter,
    NgramDrafter,
    Pass,
    usual_verify,
)

PASSES_AHEAD = 1  # passes queued beyond the one that the host is waiting for
LATE = 512  # ids of a prompt that a draft model may get later, CATCH at a time
MEASURED_S = 0.05  # how long passes of each size are timed


class SpeculativeRunner(DeviceRunner):
    """Passes replay as decode steps do, on all ranks; the host reads ids, and how many passes have ended."""

    def __init__(
        self,
        devices: Device | Sequence[Device],
        checkpoint: CheckpointLike,
        *,
        guesses: int,
        draft: CheckpointLike | None = None,
        draft_fp8: bool = False,
        draft_device: Device | None = None,
        ngram: int | None = None,
        verify: str = "auto",
        governed: bool = True,
        costs: Mapping[int, float] | None = None,
        forced: bool = False,
        loop: str = "queued",
        max_model_len: int,
        text_vocab: int,
        progress: Progress | None = None,
        comm: str = "auto",
        limit_ns: int = LIMIT_NS,
        **options: Any,
    ) -> None:
        """`draft`: a checkpoint whose ids mean the same, in fp8 or bf16; else `ngram`. The rest is DeviceRunner's.

        `draft_device`: a device of the draft's own (qwen_raw/model/draft_device.py); None: rank 0's, and its stream.
        `guesses`: a pass has at the most. `verify`: how the rows of a pass are computed, one of VERIFY
        (qwen_raw/model/speculate.py), or "auto", which follows from the model (`usual_verify`).
        `governed`: as many guesses as pay, or none. `costs`: of passes in single steps,
        by their guesses, the most among them; None: measured, on a GPU. `forced`: for benches and tests; guesses then
        stand as often as `force` says, whatever is right, and so the ids are no longer the model's. `loop`: "device",
        passes repeat themselves there (qwen_raw/model/loops.py) if that is possible; "queued", by the host.
        Raises UsageError for what there is not, QwenRawError where the two models do not fit.
        """
        if (draft is None) == (ngram is None):
            raise UsageError("speculation takes a draft model or n-grams, one of the two")
        if comm == "host":
            raise UsageError("speculation needs sums over ranks that can be captured: comm host cannot")
        if draft is None and draft_device is not None:
            raise UsageError("a draft device without a draft model")
        if draft_device is not None and loop != "queued":
            raise UsageError("a loop on one device has no draft model on another")
        self._rows, self._governed = guesses + 1, governed
        self._draft_device = draft_device
        self._link: DraftLink | None = None
        if draft_device is not None:  # before anything is loaded: the two may have no way to each other
            first, *others = devices if isinstance(devices, Sequence) else (devices,)
            self._link = DraftLink.create(first, draft_device, 1 + len(others), limit_ns)
        super().__init__(
            devices,
            checkpoint,
            max_model_len=max_model_len,
            text_vocab=text_vocab,
            spare=self._rows,
            progress=progress,
            comm=comm,
            limit_ns=limit_ns,
            **options,
        )
        if draft_device is not None:
            self.device_name += f", draft model on GPU {draft_device.ordinal}"
        self._buffers = PassBuffers.create_ranks(self.devices, self._rows, max_model_len, self.config.V, forced=forced)
        self._draft_prompt: Prompt | None = None
        if draft is not None:
            self._draft_prompt = self._open_draft(draft, draft_fp8, progress)
        self._drafters = self._make_drafters(ngram)
        self._shared = self._share() if draft is not None and len(self.ranks) > 1 else None
        self._log: list[int] = []  # guesses of each pass queued for the request
        self._from: int | None = None  # ids posted when loops of steps began, that a draft model has not seen
        self._request = (0, 0)  # the id that the host waits for next, and the end
        self._before = PassCounts(0, 0, 0, 0)  # what the requests before it came to
        self._counted: PassCounts | None = None  # when it was closed
        self._graphs: dict[int, tuple[Graph, ...]] = {}  # by guesses: one a rank
        self._governs = governed and (costs is not None or self.devices[0].kind == "cuda")
        sizes = (guesses,) if not self._governs else pass_sizes(guesses) if costs is None else sorted(costs)
        self.verify = ""
        self._start(usual_verify(self.ranks) if verify == "auto" else verify, sizes, insists=verify != "auto")
        self._loops: PassLoops | None = None  # in use
        self._made_loops: PassLoops | None = None
        if loop == "device":
            self._open_loops()
        self._catch_up = self._capture_catch_up()
        self._behind = 0  # ids that a draft model has not seen
        self.costs = self._measure() if costs is None and self.devices[0].kind == "cuda" else costs
        self._measured = int(self._told[4])  # steps of measuring, which are nobody's
        self._governor = self._new_governor()
        self._note_memory()

    @property
    def _all_devices(self) -> tuple[Device, ...]:
        return self.devices if self._draft_device is None else (*self.devices, self._draft_device)

    def _called(self, number: int) -> str:
        return super()._called(number) if number < len(self.devices) else "the draft model"

    def _open_draft(self, draft: CheckpointLike, fp8: bool, progress: Progress | None) -> Prompt:
        """On its own device or rank 0's; what is left there must hold it."""
        length = max(self.max_model_len + self._rows, LEAST_LENGTH)
        where = self.devices[0] if self._draft_device is None else self._draft_device
        (rank,) = assemble([where], draft, fp8=fp8, max_len=length, kv=self.kv_dtype, progress=progress)
        everyone = self._all_devices
        self._draft_rank = replace(rank, shares_gpu=ranks_on_gpu(everyone, everyone.index(where)) > 1)
        prompt = Prompt([self._draft_rank], captured=self._note_memory)
        prompt.load()
        return prompt

    def _make_drafters(self, ngram: int | None) -> list[Drafter | None]:
        """One a rank; None where the guesses are rank 0's."""
        if ngram is not None:
            pairs = zip(self.ranks, self._buffers, strict=True)
            return [NgramDrafter(rank, ngram, buffers.no_draft) for rank, buffers in pairs]
        assert self._draft_prompt is not None
        model = ModelDrafter(self._draft_rank, self._draft_prompt, self.text_vocab)
        first = model if self._link is None else DistantDrafter(model, self._link)
        return [first, *(None for _ in self.ranks[1:])]

    def _share(self) -> list[SharedGuesses]:
        meetings = [rank.decode.sampler.meeting for rank in self.ranks]
        return SharedGuesses.create_ranks(self.devices, [m.limit for m in meetings if m is not None])

    def _start(self, verify: str, sizes: Sequence[int], *, insists: bool = True) -> None:
        """Make passes ready. Where products of several rows find no room (small multiprocessors), prefill's do.

        `insists`: exact passes for which there is no variant are an error; else it is rows.
        """
        try:
            self.verify = verify
            self._passes = [
                Pass.create(rank, drafter, verify, buffers, sizes, self._shared[i] if self._shared else None)
                for i, (rank, drafter, buffers) in enumerate(
                    zip(self.ranks, self._drafters, self._buffers, strict=True)
                )
            ]
            self._capture(sizes)
        except NoRoomError:
            if verify == "exact" and not insists:
                self._start("rows", sizes)
            elif verify == "rows":
                self._start("chunk", sizes[-1:])
            else:
                raise

    def _capture(self, sizes: Sequence[int]) -> None:
        """A pass of each size and a step as graphs, all kernels loaded before. What is run on the way posts nothing."""
        for drafter in self._drafters:
            if drafter is not None:
                drafter.begin([0], 0.0, 0)
        for each in self._passes:
            each.begin()
            with each.rank.device.rehearsing():
                for guesses in (STEP, LIMITED, *sizes):
                    for _ in each.queue(guesses):
                        pass
            each.rank.device.synchronize()
        if self._distant is not None:
            self._distant.load(sizes)
        self._graphs = {guesses: tuple(self._parts(guesses)) for guesses in (STEP, LIMITED, *sizes)}

    def _parts(self, guesses: int) -> Iterator[Graph]:
        """A pass, captured: a graph a rank, and the draft's if it has a device of its own and there are guesses."""
        for each in self._passes:
            yield self._captured(each, guesses)
        if self._distant is not None and guesses > 0:
            yield self._distant.capture(guesses)

    @property
    def _distant(self) -> DistantDrafter | None:
        """The draft model, where it has a device of its own."""
        return self._drafters[0] if isinstance(self._drafters[0], DistantDrafter) else None

    @staticmethod
    def _captured(each: Pass, guesses: int) -> Graph:
        with each.rank.device.capture() as capture:
            for _ in each.queue(guesses):
                pass
        return capture.graph

    def _open_loops(self) -> None:
        """Where there are none, the host queues passes, and a note says why."""
        try:
            self._made_loops = PassLoops.create(self._passes, [k for k in self._graphs if k > 0])
        except UnavailableError as error:
            self.notes = (*self.notes, f"no loop on the device, passes are queued by the host: {error}")
        self.loop(True)

    def loop(self, on: bool) -> None:
        """Of a runner made with loops, between requests: whether it uses them."""
        self._loops = self._made_loops if on else None

    def _capture_catch_up(self) -> list[Graph]:
        """On rank 0 and the draft's own device, where there is a draft model that may fall behind."""
        if self._draft_prompt is None or not self._governs:
            return []
        first, device = self._passes[0], self.devices[0]
        with device.rehearsing():
            first.catch_up()
        with device.capture() as capture:
            first.catch_up()
        return [capture.graph, *([] if self._distant is None else [self._distant.capture_fill()])]

    def _measure(self) -> dict[int, float]:
        """What passes cost, in steps, by their guesses; by the host's clock, of passes that post nothing."""
        seconds = {}
        for guesses in self._live_graphs().keys() - {LIMITED}:
            rounds = 1
            for _ in range(3):
                self._place(0)
                begin = time.perf_counter()
                self._launch(guesses, rounds)
                self._wait()
                took = (time.perf_counter() - begin) / rounds
                rounds = min(max(2, int(MEASURED_S / took)), 64, self.max_model_len)
            seconds[guesses] = took
        return {guesses: took / seconds[STEP] for guesses, took in sorted(seconds.items())}

    def _launch(self, guesses: int, times: int = 1) -> None:
        """Queue passes on all ranks."""
        graphs = self._live_graphs()[guesses]
        with self._together():
            for _ in range(times):
                for graph in graphs:
                    graph.launch()

    def _wait(self) -> None:
        with self._naming_ranks():
            for device in self._all_devices:
                device.synchronize()

    def _faults(self) -> list[str]:
        said = None if self._link is None else self._link.fault()
        return [*super()._faults(), *([said] if said else [])]

    @property
    def speculated(self) -> PassCounts:
        """See Runner: since the runner was made."""
        if self._counted is not None:
            return self._counted
        right, guesses, compared, passes = (int(word) for word in self._told[1:])
        passes -= self._measured
        given = passes - self._before.passes
        done = self._log[:given]  # those queued too many gave nothing
        if self._loops is not None:
            done = done + [self._loops.running] * (given - len(done))
        steps = self._before.steps + done.count(0)
        cost = None if self.costs is None else (self._before.cost or 0.0) + sum(self.costs.get(k, 1.0) for k in done)
        loops = 0 if self._made_loops is None else self._made_loops.launched
        return PassCounts(passes, guesses, right, steps, compared, cost, loops, self.verify)

    @property
    def _told(self) -> np.ndarray[Any, np.dtype[np.uint64]]:
        """What accept.cu tells the host."""
        return self._buffers[0].told.words

    def generate(self, ids: Sequence[int], *, max_tokens: int, temperature: float, seed: int) -> Iterator[int]:
        """See Runner. The first id is posted by prefill, the others by passes."""
        self._live_step()
        self._hash = None
        first = self._launched = max(self._launched, self._buffers[0].ended[1])  # steps were measured too
        end = first + max_tokens
        self._before, self._log, self._behind = self.speculated, [], 0
        self._governor.begin(int(self._told[1]), int(self._told[3]))
        late = self._governor.hopeless and self._loops is None and len(ids) <= LATE
        with self._together():
            for each in self._passes:
                sampler, b = each.rank.decode.sampler, each.buffers
                b.limit.upload(np.array([end], np.uint32))
                b.history.view((len(ids),)).upload(np.asarray(ids, np.int32))
                sampler.set_params(temperature, seed, self.text_vocab)
                sampler.set_position(0, len(ids) - 1)
            self.prompt.queue(ids)
            for each in self._passes:  # after the target's prompt, whose first id so comes no later
                if each.drafter is not None:
                    each.drafter.begin(ids, temperature, seed, late=late)
                each.begin()
                if late:  # nothing is guessed for a while, perhaps never: a draft model gets the prompt when it is
                    each.buffers.filled.upload(np.zeros(1, np.int32))
                    self._behind = len(ids)
            self._launched = first + 1
        queued, _ = self._buffers[0].ended
        self._seen, self._from = queued, None
        try:
            for number in range(first, end):
                self._request = (number, end)
                # A draft model elsewhere would wait for the prompt, however long that takes, within its time limit.
                later = number == first and self._link is not None
                if self._loops is not None:
                    self._follow(self._loops)
                elif not later:
                    queued = self._queue_passes(queued, number, end)
                self._first_reads += number == first
                token = self._read(number, position=len(ids) + number - first)
                if later:
                    queued = self._queue_passes(queued, number, end)
                yield token
        finally:
            if self._loops is not None:
                self._loops.end()
            self._wait()  # passes still queued end: how many ids they post is theirs to say
            if self._loops is not None:
                self._log += self._loops.ended()
            self._launched = max(self._launched, self._buffers[0].ended[1])

    def _queue_passes(self, queued: int, number: int, end: int) -> int:
        """Queue passes, so that id `number` will come and some work is ahead; how many have been queued, of all."""
        told, cuda = self._told, self.devices[0].kind == "cuda"
        ended, posted = self._buffers[0].ended
        posted = max(self._launched, posted)
        while posted - number < self._rows:
            under_way = queued - ended  # each will post one id at least
            ahead = 0 if not cuda else AHEAD if self._governor.paused else PASSES_AHEAD  # the simulator works at once
            if under_way >= min(1 + ahead, end - posted):
                break
            guesses = self._governor.choose(int(told[1]), int(told[3]), end - posted - 1)
            if guesses and self._behind:
                self._catch_up_with(self._behind)
            self._behind = 0 if guesses else self._behind + 1
            guessing = any(self._log[len(self._log) - under_way :])  # and may reach the end
            self._launch(LIMITED if not guesses and guessing else guesses)
            self._log.append(guesses)
            queued += 1
        return queued

    def _follow(self, loops: PassLoops) -> None:
        """See that passes repeat themselves, as many guesses a pass as the governor wants now, till the id has come."""
        number, end = self._request
        loops.room(number)
        self._log += loops.ended()
        told, (ended, posted) = self._told, self._buffers[0].ended
        posted, wanted = max(self._launched, posted), loops.current
        for _ in range(ended - self._seen):
            wanted = self._governor.choose(int(told[1]), int(told[3]), self._rows - 1)
        self._seen = ended
        if posted >= end or loops.full or (wanted == loops.current and wanted is not None):
            return
        if loops.current is None and posted - number >= self._rows:
            return  # enough is there: the ring may have been full
        if wanted is None:
            wanted = self._governor.choose(int(told[1]), int(told[3]), self._rows - 1)
        if wanted and self._from is not None:
            loops.end()
            self._catch_up_with(posted - self._from + self._rows + AHEAD)  # steps go on until the loop sees it
            self._from = None
        elif not wanted and self._from is None:
            self._from = posted
        with self._together():
            loops.launch(wanted)

    def _idle(self) -> bool:
        """See DeviceRunner. A loop may have ended for want of room just as the host made some: then queue another."""
        if not super()._idle():
            return False
        if self._loops is not None:
            self._follow(self._loops)
        return self._loops is None or self._loops.current is None

    def _catch_up_with(self, ids: int) -> None:
        """Queue what gives a draft model the keys of so many ids."""
        with self._together():
            for _ in range(0, ids, CATCH):
                for graph in self._catch_up:
                    graph.launch()

    def force(self, acceptance: float) -> None:
        """Of a runner made with `forced`: a guess now stands with this probability. What was seen is forgotten."""
        for buffers in self._buffers:
            buffers.force(acceptance)
        self._governor = self._new_governor()

    def _new_governor(self) -> Governor:
        return Governor(self.costs if self._governed else None, self._rows - 1)

    def replay_passes(self, context: int, passes: int, guesses: int) -> None:
        """Queue passes at position `context`, that cost what others do, and post nothing if they guess: for benches."""
        if context + passes > self.max_model_len:
            raise QwenRawError(f"{passes} passes from {context} on do not fit {self.max_model_len} positions")
        self._place(context)
        self._launch(guesses, passes)

    def _place(self, context: int) -> None:
        """From here on guesses post nothing, and a pass begins at this position."""
        for each in self._passes:
            each.buffers.limit.upload(np.array([0], np.uint32))
            each.rank.decode.sampler.set_position(0, context)
            each.begin()

    def _live_graphs(self) -> dict[int, tuple[Graph, ...]]:
        if not self._graphs:
            raise QwenRawError("this runner is closed")
        return self._graphs

    def close(self) -> None:
        """See Runner."""
        if not self._graphs:
            return
        self._counted = self.speculated  # what it is read from goes with the device
        graphs, self._graphs = [*chain(*self._graphs.values()), *self._catch_up], {}
        loops = [] if self._made_loops is None else [self._made_loops.close]
        drafts = [] if self._draft_prompt is None else [self._draft_prompt.close]
        close_all([*loops, *(graph.close for graph in graphs), *drafts, super().close])
