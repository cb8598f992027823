"""What one generation cost, and how it is told: one line for people, one object for machines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from qwen_raw.generation.speculation import PassCounts


@dataclass(frozen=True, slots=True)
class Stats:
    """Measurements of one generation. Seconds are wall-clock; None means that there was nothing to measure.

    prompt_s: from the request to the first chosen id (time to first token, tokenising included).
    decode_s: from the first chosen id to the last, the consumer's own time between them included.
    """

    prompt_tokens: int
    completion_tokens: int
    prompt_s: float | None
    decode_s: float | None
    bytes_per_token: int  # weights that one decode step reads
    kv_bytes_per_token: int  # keys and values of one position
    read_ceiling: float | None  # bytes/s, where measured
    host_syncs: int  # during this generation
    peak_bytes: tuple[int, ...]  # of each GPU
    logits_hash: int | None  # of the step that chose the last id
    speculated: PassCounts | None = None  # None: every id was a step of its own

    @property
    def prompt_tps(self) -> float | None:
        """Prompt tokens per second of time to first token."""
        return self.prompt_tokens / self.prompt_s if self.prompt_s else None

    @property
    def decode_tps(self) -> float | None:
        """(n - 1) / (t_last - t_first): the first token belongs to the prompt."""
        return (self.completion_tokens - 1) / self.decode_s if self.decode_s else None

    @property
    def read_bytes_per_s(self) -> float | None:
        """Bytes of weights and of the KV cache read per second while decoding a token a step."""
        if self.speculated is not None or self.decode_tps is None:
            return None
        positions = self.prompt_tokens + self.completion_tokens / 2  # that a step reads, on average
        return (self.bytes_per_token + self.kv_bytes_per_token * positions) * self.decode_tps

    def line(self) -> str:
        """One line: TTFT, tok/s and how it is reckoned, GB/s, host syncs, logits hash."""
        parts = [f"TTFT {_number(self.prompt_s, 1e3)} ms for {counted(self.prompt_tokens)}"]
        if self.decode_tps is not None and self.decode_s is not None:
            after = self.completion_tokens - 1
            parts.append(f"{self.decode_tps:.1f} tok/s ({after} after the first in {self.decode_s:.3f} s)")
        else:
            parts.append(f"{self.completion_tokens} generated, too few for tok/s")
        if self.read_bytes_per_s is not None:
            share = (
                f" ({self.read_bytes_per_s / self.read_ceiling:.0%} of the read ceiling)" if self.read_ceiling else ""
            )
            parts.append(f"{self.read_bytes_per_s / 1e9:.1f} GB/s of weights and KV cache{share}")
        if self.speculated is not None:
            parts.append(self.speculated.line())
        parts.append(f"host syncs {self.host_syncs}")
        parts.append("logits -" if self.logits_hash is None else f"logits {self.logits_hash:08x}")
        return " · ".join(parts)

    def as_dict(self) -> dict[str, Any]:
        """The numbers under the names of the JSON report; the logits hash as eight hexadecimal digits."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "prompt_s": self.prompt_s,
            "decode_s": self.decode_s,
            "prompt_tps": self.prompt_tps,
            "decode_tps": self.decode_tps,
            "bytes_per_token": self.bytes_per_token,
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "read_bytes_per_s": self.read_bytes_per_s,
            "host_syncs": self.host_syncs,
            "peak_bytes": list(self.peak_bytes),
            "logits_hash": None if self.logits_hash is None else f"{self.logits_hash:08x}",
            "speculation": None if self.speculated is None else self.speculated.as_dict(),
        }


class Stopwatch:
    """Times of one generation: made at the request, ticked at every id."""

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._begin = clock()
        self._first: float | None = None
        self._last: float | None = None

    def tick(self) -> None:
        """An id has been chosen."""
        self._last = self._clock()
        if self._first is None:
            self._first = self._last

    @property
    def prompt_s(self) -> float | None:
        return None if self._first is None else self._first - self._begin

    @property
    def decode_s(self) -> float | None:
        """None unless two ids have been chosen."""
        if self._first is None or self._last is None or self._last <= self._first:
            return None
        return self._last - self._first


def counted(tokens: int) -> str:
    """ "1 token", "2 tokens"."""
    return f"{tokens} token{'' if tokens == 1 else 's'}"


def _number(value: float | None, scale: float) -> str:
    return "-" if value is None else f"{value * scale:.1f}"
