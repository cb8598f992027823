"""cuda_src/sample.cu: the next id, chosen on the device and posted to the host's ring."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from qwen_raw.device import F32, I32, U32, U64, Arg, Buffer, Device, HostRing
from qwen_raw.errors import require
from qwen_raw.kernels.linear import check_buffer

STEM = "sample"
BAD_ID = 0xFFFFFFFF  # posted instead of an id when a logit was not finite
SLOTS = 64  # ids that may be posted before the host has read the first


@dataclass(frozen=True, slots=True)
class Sampler:
    """Device state of one decode stream: the token loop's own memory."""

    state: Buffer  # i32 [4]: token, its position, ids chosen so far, unused
    params: Buffer  # u32 [4]: bits of temperature, seed low, seed high, text_vocab
    best: Buffer  # u64 [blocks, 2]
    counter: Buffer  # u32 [1], zero between launches
    ring: HostRing  # u64 [2·SLOTS]
    vocab: int  # V: rows of the logits
    blocks: int

    @staticmethod
    def create(dev: Device, V: int, blocks: int | None = None) -> Sampler:
        n = blocks or max(1, min(dev.sm_count, (V + 255) // 256))
        return Sampler(
            dev.zeros((4,), I32),
            dev.zeros((4,), U32),
            dev.empty((n, 2), U64),
            dev.zeros((1,), U32),
            dev.host_ring(2 * SLOTS),
            V,
            n,
        )

    @property
    def token(self) -> Buffer:
        return self.state.view((1,), 0)

    @property
    def pos(self) -> Buffer:
        return self.state.view((1,), 1)

    def set_params(self, temperature: float, seed: int, text_vocab: int) -> None:
        """Greedy when temperature is 0. Ids from text_vocab on are never chosen."""
        require(
            0 < text_vocab <= self.vocab, f"text_vocab {text_vocab} is not within the {self.vocab} rows of the LM head"
        )
        words = [int(np.float32(temperature).view(np.uint32)), seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF, text_vocab]
        self.params.upload(np.array(words, np.uint32))

    def set_position(self, token: int, pos: int) -> None:
        """What the next decode step embeds, and where. The count of ids goes on: old steps may still be posting."""
        self.state.view((2,)).upload(np.array([token, pos], np.int32))


def sample(dev: Device, logits: Buffer, s: Sampler, *, pdl: bool = False) -> None:
    """Choose from logits f32 [V] the id at position state.pos + 1; advance the state; post {id, hash} to the ring."""
    check_buffer(logits, (s.vocab,), F32, "logits")
    require(s.best.shape == (s.blocks, 2), f"scratch is {s.best.shape}, expected {(s.blocks, 2)}")
    args: list[Arg] = [s.state, logits, s.params, s.best, s.counter, s.ring.buffer, np.int32(SLOTS)]
    dev.launch(dev.kernel(STEM, "sample_f32"), (s.blocks, 1, 1), (256, 1, 1), args, pdl=pdl)
