"""The Runner of devices: one model on one GPU, or split over several, batch 1; its token loop never waits for the host.

Decode steps are queued a few ahead of what the host has read; each posts its id to a ring in host memory that the host
polls. When the consumer stops early the surplus steps run out into the ring and are skipped: every post carries the
number of its step, and the numbers go on from one request to the next.

Ranks wait for each other on their devices. So the host queues the same work for all of them before it waits for any
(`level` in qwen_raw/model/decode.py), loads all code before the first of them waits, and reads ids from rank 0 alone:
all ranks choose the same ones.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qwen_raw.device import F32, Device, Graph
from qwen_raw.errors import QwenRawError, close_all
from qwen_raw.generation.runner import Progress
from qwen_raw.generation.speculation import PassCounts
from qwen_raw.kernels.sample import BAD_ID, SLOTS
from qwen_raw.model.assembly import LIMIT_NS, assemble, describe, free_bytes
from qwen_raw.model.decode import DEFAULT, StepOptions, level
from qwen_raw.model.gemm_choice import choose_gemm
from qwen_raw.model.loading import CheckpointLike
from qwen_raw.model.prompt import Prompt
from qwen_raw.model.rank import Rank
from qwen_raw.model.uninterrupted import uninterrupted

AHEAD = 4  # decode steps queued beyond the id that the host is waiting for; must stay below SLOTS
LOGIT_ROWS = 64  # rows of logits computed and copied at a time by `logits`
POLL_CHECK_S = 0.05  # a post this late: ask the devices whether they still run


@dataclass(frozen=True, slots=True)
class Step:
    """One decode step of all ranks, to be queued any number of times."""

    ranks: tuple[Rank, ...]
    options: StepOptions
    graphs: tuple[Graph, ...]  # one a rank; none where the sums over ranks cannot be captured

    @staticmethod
    def create(ranks: Sequence[Rank], options: StepOptions = DEFAULT) -> Step:
        """Captured if that is possible. Every kernel must have been loaded."""
        capturable = "reduce" in options.skip or all(rank.residual.capturable for rank in ranks)
        return Step(tuple(ranks), options, tuple(rank.capture(options) for rank in ranks) if capturable else ())

    @property
    def posts(self) -> bool:
        """Whether it chooses an id and posts it to the ring."""
        return "sample" not in self.options.skip

    def launch(self) -> None:
        """Queue it once on every rank."""
        for graph in self.graphs:
            graph.launch()
        if not self.graphs:
            level([rank.step(self.options) for rank in self.ranks])

    def close(self) -> None:
        """Destroy the graphs; raises the first failure of work that was still queued, after all have been closed."""
        close_all([graph.close for graph in self.graphs])


class DeviceRunner:
    """Implements `qwen_raw.generation.runner.Runner` on one `Device` a rank."""

    def __init__(
        self,
        devices: Device | Sequence[Device],
        checkpoint: CheckpointLike,
        *,
        dtype: str,
        max_model_len: int,
        text_vocab: int,
        progress: Progress | None = None,
        owns_device: bool = True,
        comm: str = "auto",
        limit_ns: int = LIMIT_NS,
        spare: int = 0,
        kv: str = "bf16",
        gemm: str = "auto",
    ) -> None:
        """`devices`: one, or one a rank. `owns_device`: close() closes them too. `comm`, `limit_ns`: see `assemble`.

        `spare`: positions of the cache beyond max_model_len, for tokens that are verified together and thrown away.
        `kv`: type of the KV cache, "bf16" or "fp8". `gemm`: what multiplies
        prompts (qwen_raw/model/gemm_choice.py). Raises QwenRawError where the model does not fit.
        """
        self.devices = tuple(devices) if isinstance(devices, Sequence) else (devices,)
        self.config = checkpoint.config
        self.max_model_len, self.text_vocab, self.dtype = max_model_len, text_vocab, dtype
        self.device_name, self.driver = describe(self.devices), self.devices[0].driver
        self._owns_device = owns_device
        self.notes: tuple[str, ...] = ()
        self.read_ceiling: float | None = None
        self.kv_dtype = kv
        before = free_bytes(self._all_devices)
        self._few = max(1, spare)  # tokens whose shares are summed as one token's are
        ranks = self._assemble(
            checkpoint, dtype == "fp8", max_model_len + spare, comm=comm, limit_ns=limit_ns, progress=progress
        )
        self.ranks: Sequence[Rank] = [choose_gemm(rank, gemm) for rank in ranks]
        self.bytes_per_token = sum(rank.weights.bytes_per_token for rank in self._decoding)
        self.kv_bytes_per_token = sum(rank.shard.local.kv_bytes_per_token(kv) for rank in self._decoding)
        self._launched = 0  # ids that all steps ever queued will have posted
        self._hash: int | None = None
        self._first_reads = 0
        self.prompt = Prompt(self._prefilling, captured=self._note_memory)
        self._load()
        self._step: Step | None = Step.create(self._decoding)
        self._free_before = before
        self.peak_bytes = (0,) * len(before)
        self._note_memory()

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
        """Every device's rank; `comm`, `limit_ns`: see `assemble`. Nothing that waits for another is launched."""
        return assemble(
            self.devices,
            checkpoint,
            fp8=fp8,
            max_len=max_len,
            comm=comm,
            limit_ns=limit_ns,
            few=self._few,
            kv=self.kv_dtype,
            progress=progress,
        )

    @property
    def _all_devices(self) -> tuple[Device, ...]:
        """Every device that work is queued on."""
        return self.devices

    @property
    def _prefilling(self) -> Sequence[Rank]:
        """The ranks that a prompt goes through."""
        return self.ranks

    @property
    def _decoding(self) -> Sequence[Rank]:
        """The ranks that a decode step goes through."""
        return self.ranks

    def _note_memory(self) -> None:
        """What is held now, graphs included."""
        held = zip(self._free_before, free_bytes(self._all_devices), strict=True)
        self.peak_bytes = tuple(max(peak, was - now) for peak, (was, now) in zip(self.peak_bytes, held, strict=True))

    def _load(self) -> None:
        """Rehearse prefill, run a step without what makes ranks wait for each other: every kernel is loaded."""
        alone = len(self.ranks) == 1
        skip = frozenset() if alone else frozenset({"reduce", "sample"})
        for rank in self.ranks:
            rank.decode.sampler.set_params(0.0, 0, self.text_vocab)
            rank.decode.sampler.set_position(0, 0)
            level([rank.step(StepOptions(skip=skip))])
        self.prompt.load()
        for device in self.devices:
            device.synchronize()
        self._launched += 1 if alone else 0

    @property
    def host_syncs(self) -> int:
        """See Runner: what the devices count, and the poll for the first id of each request.

        Later ids are polled too, but of steps that were queued ahead: the host keeps up, and no device waits for it.
        """
        return sum(device.host_syncs for device in self._all_devices) + self._first_reads

    @property
    def speculated(self) -> PassCounts | None:
        """See Runner: nothing was guessed."""
        return None

    @property
    def logits_hash(self) -> int | None:
        return self._hash

    def generate(self, ids: Sequence[int], *, max_tokens: int, temperature: float, seed: int) -> Iterator[int]:
        """See Runner. The first id is posted by prefill's graph, the others by replays of the decode step's."""
        step, first = self._live_step(), self._launched
        ahead = AHEAD if self.devices[0].kind == "cuda" else 0  # the simulator works while the host launches
        self._hash = None
        with self._together():
            for rank in self.ranks:
                rank.decode.sampler.set_params(temperature, seed, self.text_vocab)
                rank.decode.sampler.set_position(0, len(ids) - 1)
            self._prefill(ids)
            self._launched += 1
        for number in range(first, first + max_tokens):
            while self._launched < min(first + max_tokens, number + 1 + ahead):
                with self._together():
                    step.launch()
                    self._launched += 1
            self._first_reads += number == first
            posting = self._prefilling if number == first else self._decoding
            yield self._read(number, position=len(ids) + number - first, ranks=posting)

    def _prefill(self, ids: Sequence[int]) -> None:
        """Queue a prompt, with the choice of the id that follows it; the samplers are set."""
        self.prompt.queue(ids)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """What the block queues is queued for all ranks, whatever happens meanwhile; a failure names the ranks."""
        with self._naming_ranks():
            if len(self._all_devices) == 1:
                yield
            else:
                held = self.devices[0].queueing() if self._capturable else nullcontext()
                with uninterrupted(), held:
                    yield

    @property
    def _capturable(self) -> bool:
        """Whether nothing in a step needs the host."""
        return all(rank.residual.capturable for rank in self.ranks)

    @contextmanager
    def _naming_ranks(self) -> Iterator[None]:
        """An error of the block also says, where ranks have given up waiting for others, who waited for whom."""
        try:
            yield
        except QwenRawError as error:
            faults = self._faults()
            if not faults:
                raise
            raise QwenRawError("; ".join([*faults, str(error)])) from error

    def _faults(self) -> list[str]:
        """After a launch has failed: who waited for whom in vain."""
        return [fault for rank in self.ranks if (fault := rank.fault()) is not None]

    def _read(self, step: int, position: int, ranks: Sequence[Rank] | None = None) -> int:
        """Wait, by polling host memory, for the id that step number `step` of these ranks (None: of all) posts."""
        posting = next(rank for rank in ranks or self.ranks if rank.chooses)
        words, slot = posting.decode.sampler.ring.words, 2 * (step % SLOTS)
        check_at = time.perf_counter() + POLL_CHECK_S
        while int(words[slot + 1]) != step + 1:
            if time.perf_counter() < check_at:
                continue
            if self._idle() and int(words[slot + 1]) != step + 1:
                raise QwenRawError(f"{self.device_name} finished its work without posting token {position}")
            check_at = time.perf_counter() + POLL_CHECK_S
        word = int(words[slot])
        if word & 0xFFFFFFFF == BAD_ID:
            raise QwenRawError(
                f"a logit for position {position} is not finite: the weights are damaged or the arithmetic overflowed"
            )
        self._hash = word >> 32
        return word & 0xFFFFFFFF

    def _idle(self) -> bool:
        """Whether all ranks have finished all work. Raises QwenRawError, naming ranks, if some of it failed."""
        idle = True
        with self._naming_ranks():
            for number, device in enumerate(self._all_devices):
                try:
                    if device.kind == "sim":  # where no time passes before somebody waits
                        device.synchronize()
                    idle &= device.idle()
                except QwenRawError as error:
                    if len(self._all_devices) == 1:
                        raise
                    raise QwenRawError(f"{self._called(number)} on {device.name}: {error}") from error
        return idle

    def _called(self, number: int) -> str:
        """What messages call the one on a device of _all_devices."""
        return f"rank {number}"

    def logits(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """See Runner. Through prefill's kernels."""
        self._live_step()
        out = np.empty((len(ids), self.config.V), np.float32)
        rows = min(LOGIT_ROWS, self.ranks[0].prefill.chunk)
        heads = [rank for rank in self._prefilling if rank.chooses]
        buffers = [rank.device.empty((rows, rank.shard.local.V), F32) for rank in heads]
        for pos0 in range(0, len(ids), rows):
            part = ids[pos0 : pos0 + rows]
            with self._together():
                for rank in self._prefilling:
                    rank.prefill.put(part, pos0)
                level([rank.prefill_chunk(len(part)) for rank in self._prefilling])
            for rank, buffer in zip(heads, buffers, strict=True):
                view = buffer.view((len(part), rank.shard.local.V))
                rank.logits(len(part), view)
                with self._naming_ranks():
                    out[pos0 : pos0 + len(part), rank.shard.vocab] = view.download()
        return out

    def decode_logits(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """The same as `logits`, token by token through decode's kernels: both paths must compute one function."""
        self._live_step()
        out, options = np.empty((len(ids), self.config.V), np.float32), StepOptions(skip=frozenset({"sample"}))
        for pos, token in enumerate(ids):
            with self._together():
                for rank in self._decoding:
                    rank.decode.sampler.set_position(token, pos)
                level([rank.step(options) for rank in self._decoding])
            with self._naming_ranks():
                for rank in self._decoding:
                    if rank.chooses:
                        out[pos, rank.shard.vocab] = rank.decode.logits.download()
        return out

    def capture_step(self, options: StepOptions) -> Step:
        """A step launched otherwise, to give to `replay`: for benches."""
        return Step.create(self._decoding, options)

    def replay(self, context: int, steps: int, step: Step | None = None) -> None:
        """Queue `steps` decode steps (or replays of `step`) from position `context` on: for benches.

        The keys before that position are whatever the cache holds.
        """
        step = step or self._live_step()
        if context + steps > self.max_model_len:
            raise QwenRawError(f"{steps} steps from position {context} on do not fit {self.max_model_len} positions")
        with self._together():
            for rank in self.ranks:
                rank.decode.sampler.set_position(0, context)
            for _ in range(steps):
                step.launch()
            self._launched += steps if step.posts else 0

    def _live_step(self) -> Step:
        if self._step is None:
            raise QwenRawError("this runner is closed")
        return self._step

    def close(self) -> None:
        """See Runner. Raises the first failure of work that was still queued, after everything has been closed."""
        if self._step is None:
            return
        step, self._step = self._step, None
        self.ranks = []
        close_all([step.close, self.prompt.close, *(device.close for device in self._all_devices if self._owns_device)])
