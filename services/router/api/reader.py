"""Tokens of an answer to pieces: text alone, or text that SGLang's parsers take apart."""

from typing import Protocol

from services.router.core.effects import End, Outcome
from services.router.text.parsers import Parsing
from services.router.text.pieces import CallBegun, Piece, Text
from services.router.text.stream import TextStream


class Reader(Protocol):
    """Reads one answer. `stopped`: it is complete, whatever the engine goes on to say."""

    stopped: bool
    calls: int

    @property
    def stop(self) -> str | None:
        """The stop string that ended it."""
        ...

    async def read(self, tokens: list[int], end: End | None) -> list[Piece]:
        """The pieces that new tokens, or the answer's end, make certain."""
        ...

    def close(self) -> None:
        """Nothing more is read."""
        ...


class PlainReader:
    """Text as it comes. `stop_ids` end the answer and are not text."""

    calls = 0

    def __init__(self, text: TextStream, stop_ids: frozenset[int]) -> None:
        self._text, self._stop_ids = text, stop_ids
        self._held: list[int] = []
        self.stopped = False

    @property
    def stop(self) -> str | None:
        return self._text.stop

    def words(self, tokens: list[int], end: End | None) -> str:
        """The text of new tokens; one that may have stopped the answer is held back until its end says so."""
        tokens, self._held = [*self._held, *tokens], []
        if end is None and tokens and tokens[-1] in self._stop_ids:
            self._held = [tokens.pop()]
        elif end is not None and end.trimmed:
            tokens = tokens[:-1]
        text = self._text.push(tokens)
        self.stopped = self._text.stopped
        return text if end is None or self.stopped else text + self._text.flush()

    def pieces(self, tokens: list[int], end: End | None) -> list[Piece]:
        """What `read` returns, without a wait."""
        text = self.words(tokens, end)
        return [Text(text)] if text else []

    async def read(self, tokens: list[int], end: End | None) -> list[Piece]:
        return self.pieces(tokens, end)

    def close(self) -> None:
        """Nothing is held."""


class ParsedReader:
    """Text through parsers. Not `streaming`: all of it at the end. `one_call`: the answer ends with its first call."""

    def __init__(self, plain: PlainReader, parsing: Parsing, *, streaming: bool, one_call: bool) -> None:
        self._plain, self._parsing, self._streaming, self._one_call = plain, parsing, streaming, one_call
        self._parts: list[str] = []
        self.stopped = False
        self.calls = 0

    @property
    def stop(self) -> str | None:
        return self._plain.stop

    async def read(self, tokens: list[int], end: End | None) -> list[Piece]:
        if self.stopped:
            return []
        text = self._plain.words(tokens, end)
        over = end is not None or self._plain.stopped
        cut = self._plain.stopped or (end is not None and end.record.outcome is Outcome.LENGTH)
        if self._streaming:
            pieces = await self._parsing.push(text)
            if over:
                pieces += await self._parsing.end(cut=cut)
        else:
            self._parts.append(text)
            pieces = await self._parsing.whole("".join(self._parts), cut=cut) if over else []
        self.stopped = self._plain.stopped
        return self._counted(pieces)

    def _counted(self, pieces: list[Piece]) -> list[Piece]:
        kept: list[Piece] = []
        for piece in pieces:
            if isinstance(piece, CallBegun):
                if self._one_call and self.calls:
                    self.stopped = True
                    break
                self.calls += 1
            kept.append(piece)
        return kept

    def close(self) -> None:
        self._parsing.close()
