"""When a generation ends: stop strings in the text, EOS ids among the tokens."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Cuts streamed text before a stop string, whatever pieces the text arrives in.

    The text ends where the first stop string in it starts (the first in the text, not in the list). Characters that may
    yet turn out to be the beginning of one are held back, so nothing of a stop string is ever shown.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def feed(self, piece: str) -> str:
        """Take the next piece of text; return what can be shown now. After a stop: always ""."""
        if self.stopped:
            return ""
        text = self._held + piece
        match, open_end = self._first_match(text), self._first_open_end(text)
        if match < open_end:
            return self._stop(text[:match])
        # a complete match may still lose to a stop string that started before it and is not complete yet
        self._held = text[open_end:]
        return text[:open_end]

    def flush(self) -> str:
        """The text is over: return what was held back, cut at a stop string that is complete in it."""
        text, self._held = self._held, ""
        match = self._first_match(text)
        return self._stop(text[:match]) if match < len(text) else text

    def _stop(self, rest: str) -> str:
        self.stopped, self._held = True, ""
        return rest

    def _first_match(self, text: str) -> int:
        """Where the first complete stop string starts; len(text) if there is none."""
        starts = (text.find(stop) for stop in self._stops)
        return min((start for start in starts if start >= 0), default=len(text))

    def _first_open_end(self, text: str) -> int:
        """Where the longest end of the text starts that is a proper beginning of a stop string; else len(text)."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for start in range(max(0, len(text) - longest), len(text)):
            end = text[start:]
            if any(len(end) < len(stop) and stop.startswith(end) for stop in self._stops):
                return start
        return len(text)
