"""One generation under way: ids from a runner become text pieces, until EOS, a stop string, a limit or the consumer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

from qwen_raw.errors import QwenRawError
from qwen_raw.generation.sampling import SamplingParams
from qwen_raw.generation.stop import StopStrings
from qwen_raw.observe.stats import Stats, Stopwatch

FinishReason = Literal["stop", "length", "interrupted"]


class StreamDecoder(Protocol):
    """Turns ids into text one by one, never giving out part of a character."""

    def step(self, token_id: int) -> str:
        """The text that `token_id` completes; "" while a character is incomplete."""

    def flush(self) -> str:
        """What is left at the end: an unfinished character becomes U+FFFD."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished generation."""

    token_ids: list[int]  # everything that was chosen, the EOS or the stop string's tokens included
    text: str  # without EOS and without the stop string
    finish_reason: FinishReason  # stop: EOS or a stop string; length: max_tokens or the end of the context
    stats: Stats


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and parameters as they are run, after validation and defaults."""

    ids: list[int]
    params: SamplingParams
    max_tokens: int  # what params and the rest of the context allow; 0 when the prompt fills the context
    seed: int | None  # None: greedy, nothing is drawn


class TextStream:
    """Iterate for text pieces (whole characters, never empty); then `completion()` says how it went.

    Not iterating to the end is an interruption: `interrupt()` ends it and returns the text still held back. Where
    somebody else ended it (`end`), going on with the iteration raises QwenRawError.
    """

    def __init__(
        self,
        request: Request,
        ids: Iterator[int],
        *,
        decoder: StreamDecoder,
        eos_ids: frozenset[int],
        watch: Stopwatch,
        measure: Callable[[int], Stats],
    ) -> None:
        """`ids` gives request.max_tokens ids. `eos_ids`: those that end the text, empty to ignore EOS.

        `measure(tokens)` takes the final measurements.
        """
        self.request = request
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._ids = ids
        self._decoder = decoder
        self._eos_ids = eos_ids
        self._stop = StopStrings(request.params.stop)
        self._watch = watch
        self._measure = measure
        self._stats: Stats | None = None
        self._text: list[str] = []
        self._ended_because: str | None = None  # by others than the consumer

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        while self.finish_reason is None:
            piece = self._advance()
            if piece:
                return piece
        if self._ended_because is not None:
            raise QwenRawError(self._ended_because)
        raise StopIteration

    def _advance(self) -> str:
        """Take one id; the text it gives, possibly ""."""
        if len(self.token_ids) == self.request.max_tokens:
            return self._finish("length")
        token = next(self._ids, None)
        if token is None:  # an error or an interruption reached the runner before this call
            return self._finish("interrupted")
        self._watch.tick()
        self.token_ids.append(token)
        if token in self._eos_ids:
            return self._finish("stop")
        piece = self._stop.feed(self._decoder.step(token))
        self._text.append(piece)
        return piece + self._finish("stop") if self._stop.stopped else piece

    def _finish(self, reason: FinishReason) -> str:
        """End the generation; the text that was held back."""
        close = getattr(self._ids, "close", None)  # generators have it, plain iterators need it not
        if close is not None:
            try:
                close()
            except ValueError as error:  # how a generator says that it is being run at this moment
                raise QwenRawError("the engine is at work in another thread: it serves one at a time") from error
        tail = self._stop.feed(self._decoder.flush()) + self._stop.flush()
        self._text.append(tail)
        self._stats = self._measure(len(self.token_ids))
        # last, so that a Ctrl-C in here leaves a stream that can still be ended
        self.finish_reason = "stop" if self._stop.stopped and reason == "length" else reason
        return tail

    def interrupt(self) -> str:
        """End the generation here, if it is still under way; the text that was held back."""
        return "" if self.finish_reason is not None else self._finish("interrupted")

    def end(self, because: str) -> None:
        """End it in the consumer's absence, if it is still under way: the consumer will be told why."""
        if self.finish_reason is None:
            self.interrupt()
            self._ended_because = because

    def completion(self) -> Completion:
        """The result, after the last piece or an interruption; a stream under way is interrupted first."""
        self.interrupt()
        assert self.finish_reason is not None and self._stats is not None
        return Completion(list(self.token_ids), "".join(self._text), self.finish_reason, self._stats)
