"""What the engine asks of whatever computes the model: a NumPy reference, a GPU, or the CPU's simulator.

A runner owns the weights and the KV cache of one model on one device and serves one sequence at a time.
The engine has checked every argument before it reaches a runner: ids are within range, and
len(ids) + max_tokens <= max_model_len.

Implementations: `qwen_raw.reference.ReferenceRunner`, `qwen_raw.model.runner.DeviceRunner` and its
`qwen_raw.model.speculative.SpeculativeRunner`. Both are built as
`Runner(..., checkpoint, *, dtype, max_model_len, text_vocab, progress)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from qwen_raw.config import ModelConfig
from qwen_raw.generation.speculation import PassCounts

# progress(stage, done, total): how far loading has come, in bytes of weights; called from the loading thread.
Progress = Callable[[str, int, int], None]


class Runner(Protocol):
    """One model on one device, batch 1."""

    config: ModelConfig
    max_model_len: int  # positions the KV cache can hold: prompt and generated tokens together
    text_vocab: int  # ids >= text_vocab are padding rows of the LM head and are never chosen
    device_name: str  # for people: "NVIDIA H200", "NumPy on 2 cores"
    driver: str  # version of what runs the device: "CUDA driver 12.8", "NumPy 2.4.6"
    dtype: str  # how the linears' weights are stored: "bf16" or "fp8"
    bytes_per_token: int  # weight bytes that one decode step reads, LM head included
    kv_dtype: str  # how keys and values are rounded: "bf16" or "fp8"
    kv_bytes_per_token: int  # bytes of keys and values that one position takes, of which a step reads all before it
    read_ceiling: float | None  # bytes/s that plain reads reach on this device, None where nobody measured it

    notes: tuple[str, ...]  # lines that a user should see: what was asked for and cannot be

    @property
    def host_syncs(self) -> int:
        """Times the host has waited for the device since the runner was made: of a request, once for its first id."""

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """Memory held at the most, weights and KV cache included: of each GPU, in order of ranks, the draft's last."""

    @property
    def speculated(self) -> PassCounts | None:
        """What was guessed since the runner was made, and how much of it was right; None where nothing is guessed."""

    @property
    def logits_hash(self) -> int | None:
        """`logits_hash` below, of the step that chose the id yielded last; None before the first."""

    def generate(self, ids: Sequence[int], *, max_tokens: int, temperature: float, seed: int) -> Iterator[int]:
        """Yield the max_tokens ids that follow `ids`, chosen as `qwen_raw.generation.sampling.choose` would.

        The first is ready after prefill. EOS is an id like any other: the consumer stops. Closing the iterator early
        (also because of an exception in the consumer) drops surplus work, and the runner is ready for the next call.
        Raises QwenRawError when the logits are not finite.
        """

    def logits(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Logits [T, V] after each of the T ids, teacher-forced from an empty cache. Padding rows included."""

    def close(self) -> None:
        """Free everything; later calls fail. Closing twice is harmless."""


def logits_hash(logits: npt.NDArray[np.float32]) -> int:
    """A 32-bit fingerprint of one row of logits: any change of any bit of it shows in the stats line.

    logits: [text_vocab] float32. h = sum over ids of (bits(logit) ^ (id * 0x9E3779B1)) * 0x85EBCA6B, mod 2**32;
    a sum, so that a GPU may add the terms in any order.
    """
    bits: npt.NDArray[np.uint32] = np.ascontiguousarray(logits, dtype=np.float32).view(np.uint32)
    ids: npt.NDArray[np.uint32] = np.arange(bits.size, dtype=np.uint32)
    mixed: npt.NDArray[Any] = (bits ^ (ids * np.uint32(0x9E3779B1))) * np.uint32(0x85EBCA6B)
    return int(mixed.sum(dtype=np.uint64)) & 0xFFFFFFFF
