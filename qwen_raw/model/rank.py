"""One rank: its device, what it holds there, and the work that it queues. The runner keeps a list of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from qwen_raw.device import Buffer, Device, Graph
from qwen_raw.kernels.last_row import last_row
from qwen_raw.kernels.sample import sample
from qwen_raw.model.decode import DEFAULT, StepOptions, decode_step, lm_head
from qwen_raw.model.prefill import all_logits, prefill_chunk
from qwen_raw.model.residual import Residual
from qwen_raw.model.shard import Shard
from qwen_raw.model.state import DecodeBuffers, KVCache, PrefillBuffers
from qwen_raw.model.weights import Weights


@dataclass(frozen=True, slots=True)
class Rank:
    """Everything of one rank. Work is queued on the device's stream; nothing here waits for it.

    What is an iterator has to be run with those of all other ranks, by `qwen_raw.model.decode.level`.
    """

    device: Device
    shard: Shard
    weights: Weights
    cache: KVCache
    rope: Buffer
    decode: DecodeBuffers
    prefill: PrefillBuffers
    residual: Residual
    shares_gpu: bool = False  # with other ranks

    @property
    def chooses(self) -> bool:
        """Whether it holds rows of the LM head, and so posts ids."""
        return self.weights.head.N > 0

    def step(self, options: StepOptions = DEFAULT) -> Iterator[None]:
        """One decode step.

        Where ranks share a GPU, without dependent launches: blocks that wait for the previous kernel would take the
        place of another rank's, which that kernel may be waiting for.
        """
        options = replace(options, pdl=options.pdl and not self.shares_gpu)
        return decode_step(
            self.device,
            self.shard.local,
            self.weights,
            self.cache,
            self.rope,
            self.decode,
            self.residual,
            options,
        )

    def capture(self, options: StepOptions = DEFAULT) -> Graph:
        """The same as a graph; its kernels must have been loaded."""
        with self.device.capture() as capture:
            for _ in self.step(options):
                pass
        return capture.graph

    def prefill_chunk(
        self, rows: int, *, choose: bool = False, skip: frozenset[str] = frozenset(), layers: int | None = None
    ) -> Iterator[None]:
        """The chunk that prefill.put has uploaded through the layers. `rows`, `skip`, `layers`: see prefill_chunk.

        `choose`: then choose the id that follows its last token, whose position the sampler must hold.
        """
        yield from prefill_chunk(
            self.device,
            self.shard.local,
            self.weights,
            self.cache,
            self.rope,
            self.prefill,
            self.residual,
            rows,
            skip,
            layers,
        )
        if choose:
            self.choose_first(rows)

    def choose_first(self, rows: int) -> None:
        """The LM head on the chunk's last token alone, and the choice of an id."""
        h = self.prefill.h.view((rows, self.shard.whole.D))
        last_row(self.device, self.decode.h, h, self.prefill.span)
        lm_head(self.device, self.shard.local, self.weights, self.decode.h, self.decode.logits)
        sample(self.device, self.decode.logits, self.decode.sampler)

    def capture_prefill(self, rows: int, *, choose: bool) -> Graph:
        """prefill_chunk as a graph; its kernels must have been loaded."""
        with self.device.capture() as capture:
            for _ in self.prefill_chunk(rows, choose=choose):
                pass
        return capture.graph

    def logits(self, rows: int, out: Buffer) -> None:
        """out f32 [rows, V]: the logits of every row of a chunk, V of this rank."""
        h = self.prefill.h.view((rows, self.shard.whole.D))
        all_logits(self.device, self.shard.local, self.weights, self.prefill, h, out)

    def fault(self) -> str | None:
        """After a launch has failed: which rank this one waited for in vain, if it did."""
        meeting = self.decode.sampler.meeting
        return self.residual.fault() or (meeting.limit.fault() if meeting is not None else None)
