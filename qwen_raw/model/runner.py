"""The Runner of a device: one model on one GPU (or the simulator), batch 1; its token loop never waits for the host.

Decode steps are queued a few ahead of what the host has read; each posts its id to a ring in host memory that the host
polls. When the consumer stops early the surplus steps run out into the ring and are skipped: every post carries the
number of its step, and the numbers go on from one request to the next.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qwen_raw.device import F32, Buffer, Device, Graph
from qwen_raw.errors import QwenRawError
from qwen_raw.generation.runner import Progress
from qwen_raw.kernels.sample import BAD_ID, SLOTS, sample
from qwen_raw.model.decode import DEFAULT, StepOptions, decode_step, lm_head
from qwen_raw.model.loading import CheckpointLike
from qwen_raw.model.prefill import all_logits, prefill_chunk
from qwen_raw.model.state import DecodeBuffers, KVCache, PrefillBuffers, device_rope_table, state_bytes
from qwen_raw.model.weights import load_weights, weight_bytes

AHEAD = 4  # decode steps queued beyond the id that the host is waiting for; must stay below SLOTS
LOGIT_ROWS = 64  # rows of logits computed and copied at a time by `logits`
POLL_CHECK_S = 0.05  # a post this late: ask the device whether it still runs


@dataclass(frozen=True, slots=True)
class StepGraph:
    """A captured step; `posts`: it chooses an id and posts it to the ring."""

    graph: Graph
    posts: bool


class DeviceRunner:
    """Implements `qwen_raw.generation.runner.Runner` on a `Device`."""

    def __init__(
        self,
        device: Device,
        checkpoint: CheckpointLike,
        *,
        dtype: str,
        max_model_len: int,
        text_vocab: int,
        progress: Progress | None = None,
        owns_device: bool = True,
    ) -> None:
        """`owns_device`: close() closes the device too. Raises QwenRawError where the model does not fit."""
        self.config = c = checkpoint.config
        self.max_model_len, self.text_vocab, self.dtype = max_model_len, text_vocab, dtype
        self.device, self.device_name, self.driver = device, device.name, device.driver
        self._owns_device = owns_device
        self.read_ceiling: float | None = None
        self._check_memory(fp8=dtype == "fp8")
        free_before = device.memory_info()[0]
        self.weights = load_weights(device, checkpoint, fp8=dtype == "fp8", progress=progress)
        self.bytes_per_token = self.weights.bytes_per_token
        self.cache = KVCache.create(device, c, max_model_len)
        self.rope = device_rope_table(device, c, max_model_len)
        self.decode = DecodeBuffers.create(device, c, max_model_len)
        self.prefill = PrefillBuffers.create(device, c, max_model_len)
        self._launched = 0  # ids that all steps ever queued will have posted
        self._hash: int | None = None
        self._graph: Graph | None = self._capture()
        self.peak_bytes = free_before - device.memory_info()[0]

    def _check_memory(self, fp8: bool) -> None:
        c = self.config
        free, total = self.device.memory_info()
        weights, state = weight_bytes(c, fp8), state_bytes(c, self.max_model_len)
        if weights + state > free:
            gib = [f"{n / 2**30:.1f} GiB" for n in (weights, state, free, total)]
            raise QwenRawError(
                f"{c.name or 'the model'} needs {gib[0]} for weights and {gib[1]} for a context of "
                f"{self.max_model_len}; {gib[2]} of {gib[3]} are free on {self.device_name}: "
                "use a smaller --max-model-len, --dtype fp8 or a smaller model"
            )

    def _capture(self) -> Graph:
        """One prefill and one step eagerly, so that every module is loaded, then the same step as a graph."""
        self.decode.sampler.set_params(0.0, 0, self.text_vocab)
        self._prefill([0])
        self._step()
        with self.device.capture() as capture:
            self._step()
        self._launched += 1
        return capture.graph

    def _step(self, options: StepOptions = DEFAULT) -> None:
        decode_step(self.device, self.config, self.weights, self.cache, self.rope, self.decode, options)

    @property
    def host_syncs(self) -> int:
        return self.device.host_syncs

    @property
    def logits_hash(self) -> int | None:
        return self._hash

    def generate(self, ids: Sequence[int], *, max_tokens: int, temperature: float, seed: int) -> Iterator[int]:
        """See Runner. The first id is posted by prefill, the others by replays of the decode graph."""
        graph = self._live_graph()
        sampler, first = self.decode.sampler, self._launched
        ahead = AHEAD if self.device.kind == "cuda" else 0  # the simulator works while the host launches
        self._hash = None
        sampler.set_params(temperature, seed, self.text_vocab)
        h = self._prefill(ids)
        lm_head(self.device, self.config, self.weights, h, self.decode.logits)
        sampler.set_position(0, len(ids) - 1)
        sample(self.device, self.decode.logits, sampler)
        self._launched += 1
        for step in range(first, first + max_tokens):
            while self._launched < min(first + max_tokens, step + 1 + ahead):
                graph.launch()
                self._launched += 1
            yield self._read(step, position=len(ids) + step - first)

    def _prefill(self, ids: Sequence[int]) -> Buffer:
        """Run all ids through the layers, chunk by chunk; the last row of the residual stream, f32 [D]."""
        for pos0 in range(0, len(ids), self.prefill.chunk):
            part = ids[pos0 : pos0 + self.prefill.chunk]
            h = prefill_chunk(self.device, self.config, self.weights, self.cache, self.rope, self.prefill, part, pos0)
        return h.view((self.config.D,), (len(part) - 1) * self.config.D)

    def _read(self, step: int, position: int) -> int:
        """Wait, by polling host memory, for the id that step number `step` posts."""
        words, slot = self.decode.sampler.ring.words, 2 * (step % SLOTS)
        check_at = time.perf_counter() + POLL_CHECK_S
        while int(words[slot + 1]) != step + 1:
            if time.perf_counter() < check_at:
                continue
            if self.device.idle() and int(words[slot + 1]) != step + 1:
                raise QwenRawError(f"{self.device_name} finished its work without posting token {position}")
            check_at = time.perf_counter() + POLL_CHECK_S
        word = int(words[slot])
        if word & 0xFFFFFFFF == BAD_ID:
            raise QwenRawError(
                f"a logit for position {position} is not finite: the weights are damaged or the arithmetic overflowed"
            )
        self._hash = word >> 32
        return word & 0xFFFFFFFF

    def logits(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """See Runner. Through prefill's kernels."""
        self._live_graph()
        c, out = self.config, np.empty((len(ids), self.config.V), np.float32)
        rows = min(LOGIT_ROWS, self.prefill.chunk)
        buffer = self.device.empty((rows, c.V), F32)
        for pos0 in range(0, len(ids), rows):
            part = ids[pos0 : pos0 + rows]
            h = prefill_chunk(self.device, c, self.weights, self.cache, self.rope, self.prefill, part, pos0)
            view = buffer.view((len(part), c.V))
            all_logits(self.device, c, self.weights, self.prefill, h, view)
            out[pos0 : pos0 + len(part)] = view.download()
        return out

    def decode_logits(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """The same as `logits`, token by token through decode's kernels: both paths must compute one function."""
        self._live_graph()
        b, out = self.decode, np.empty((len(ids), self.config.V), np.float32)
        for pos, token in enumerate(ids):
            b.sampler.set_position(token, pos)
            self._step(StepOptions(skip=frozenset({"sample"})))
            out[pos] = b.logits.download()
        return out

    def capture_step(self, options: StepOptions) -> StepGraph:
        """One step launched otherwise, to give to `replay`: for benches."""
        with self.device.capture() as capture:
            self._step(options)
        return StepGraph(capture.graph, posts="sample" not in options.skip)

    def replay(self, context: int, steps: int, step: StepGraph | None = None) -> None:
        """Queue `steps` decode steps (or replays of `step`) from position `context` on: for benches.

        The keys before that position are whatever the cache holds.
        """
        live = StepGraph(self._live_graph(), posts=True)
        step = step or live
        if context + steps > self.max_model_len:
            raise QwenRawError(f"{steps} steps from position {context} on do not fit {self.max_model_len} positions")
        self.decode.sampler.set_position(0, context)
        for _ in range(steps):
            step.graph.launch()
        self._launched += steps if step.posts else 0

    def _live_graph(self) -> Graph:
        if self._graph is None:
            raise QwenRawError("this runner is closed")
        return self._graph

    def close(self) -> None:
        """See Runner."""
        if self._graph is not None:
            self._graph.close()
            self._graph = None
            del self.weights, self.cache, self.rope, self.decode, self.prefill
            if self._owns_device:
                self.device.close()
