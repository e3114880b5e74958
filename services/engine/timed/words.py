"""Text of token ids and back, for a timed engine that plays a script; the router has its own."""

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

BYTES = 256
"""In the byte tokenizer ids below are bytes, ids from here on are markers between messages."""


class UnusableWords(ValueError):
    """A tokenizer that cannot be loaded; the text names the path."""


class Words(Protocol):
    """What a script needs of a tokenizer."""

    def is_marker(self, token: int) -> bool:
        """Whether this token stands between messages and is no text."""
        ...

    def text(self, tokens: Sequence[int]) -> str: ...

    def tokens(self, text: str) -> list[int]: ...


class ByteWords:
    """One token per byte: the router's own tokenizer for engines without a model."""

    def is_marker(self, token: int) -> bool:
        return token >= BYTES

    def text(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < BYTES).decode(errors="replace")

    def tokens(self, text: str) -> list[int]:
        return list(text.encode())


class ModelWords:
    """The tokenizer of a Hugging Face folder."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        try:
            self._library = Tokenizer.from_str((folder / "tokenizer.json").read_text())
        except OSError as error:
            raise UnusableWords(f"timed.tokenizer {str(folder)!r}: {error}") from error
        added = self._library.get_added_tokens_decoder()
        self._markers = frozenset(number for number, token in added.items() if token.special)

    def is_marker(self, token: int) -> bool:
        return token in self._markers

    def text(self, tokens: Sequence[int]) -> str:
        return self._library.decode(list(tokens), skip_special_tokens=True)

    def tokens(self, text: str) -> list[int]:
        return list(self._library.encode(text, add_special_tokens=False).ids)


def words_of(tokenizer: str) -> Words:
    """The words of a folder with tokenizer.json, or of bytes for "". UnusableWords."""
    return ModelWords(Path(tokenizer)) if tokenizer else ByteWords()


def last_message(tokens: "array[int]", words: Words) -> tuple[list[int], list[int]]:
    """The last text between two markers, and what follows the last marker: the opening of the answer, and its start."""
    end = len(tokens)
    begin = _after_marker(tokens, end, words)
    opening = list(tokens[begin:end])
    while begin > 0:
        end = begin - 1
        begin = _after_marker(tokens, end, words)
        message = list(tokens[begin:end])
        if message and words.text(message).strip():
            return message, opening
    return opening, []


def _after_marker(tokens: "array[int]", end: int, words: Words) -> int:
    """The smallest index from which on there is no marker before `end`."""
    begin = end
    while begin > 0 and not words.is_marker(tokens[begin - 1]):
        begin -= 1
    return begin
