"""Tokens to text while they come: whole characters only, stop strings found across token borders."""

from collections.abc import Sequence

from tokenizers import Tokenizer as Library
from tokenizers.decoders import DecodeStream


class StopFinder:
    """Cuts a growing text at the first stop string; holds back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """The text that is certain now; after a stop string was found, nothing."""
        if self.found is not None:
            return ""
        if not self._stops:
            return text
        pending = self._held + text
        hits = [(at, stop) for stop in self._stops if (at := pending.find(stop)) >= 0]
        if hits:
            at, self.found = min(hits)
            self._held = ""
            return pending[:at]
        keep = self._beginnings(pending)
        self._held = pending[len(pending) - keep :]
        return pending[: len(pending) - keep]

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held

    def _beginnings(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = min(len(text), max(len(stop) for stop in self._stops) - 1)
        for length in range(longest, 0, -1):
            end = text[len(text) - length :]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0


class TextStream:
    """The text of one answer. Characters split over tokens come whole with their last token, or not at all."""

    def __init__(self, library: Library, stops: Sequence[str] = (), *, skip_special: bool = True) -> None:
        self._library = library
        self._decoder = DecodeStream(skip_special_tokens=skip_special)
        self._stops = StopFinder(stops)

    @property
    def stopped(self) -> bool:
        """A stop string was found: the answer is complete before it."""
        return self._stops.found is not None

    @property
    def stop(self) -> str | None:
        """The stop string that was found."""
        return self._stops.found

    def push(self, tokens: Sequence[int]) -> str:
        """The new text that `tokens` make certain."""
        step, library = self._decoder.step, self._library
        return self._stops.push("".join([step(library, token) or "" for token in tokens]))

    def flush(self) -> str:
        """The rest, at the end of the answer."""
        return self._stops.flush()
