"""Tokens of a text, segment by segment: from one special token to the next nothing depends on what lies around it.

A tokenizer first finds its added tokens in the text as it stands, then normalises, splits and encodes what lies
between them, each part for itself. So a text may be cut where such a token begins, and the tokens of the parts are
those of the whole. That holds only for tokens that are looked for before normalising and take no spaces from around
them, and only if no rule treats the first word of a text in its own way; otherwise the text is not cut.
"""

import re
import sys
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer as Library

_ENTRY_BYTES = 300
"""What an entry of the cache takes beside its text and its tokens, about."""


class Cuts:
    """Where a text may be cut. `between` gives its segments, which join to the text."""

    def __init__(self, found: Sequence[str], usable: Sequence[str]) -> None:
        """`found`: all tokens looked for in the text as it stands; a cut is where one of `usable` begins."""
        self._usable = frozenset(usable)
        longest_first = sorted(found, key=len, reverse=True)
        token = "|".join(map(re.escape, longest_first))
        self._pattern = re.compile(f"({token})(?:{token})*") if self._usable else None

    @classmethod
    def of(cls, library: Library, definition: Mapping[str, Any]) -> "Cuts":
        """The cuts of a tokenizer; `definition` is its tokenizer.json."""
        added = [token for token in library.get_added_tokens_decoder().values() if token.content]
        raw = [token for token in added if not token.normalized]
        rules = (definition.get("normalizer"), definition.get("pre_tokenizer"))
        by_chance = (definition.get("model") or {}).get("dropout")
        if by_chance or any(map(_first_word_rule, rules)) or any(token.single_word for token in added):
            return cls([], [])
        usable = [token.content for token in raw if not (token.lstrip or token.rstrip)]
        return cls([token.content for token in raw], usable)

    def between(self, text: str) -> Iterator[str]:
        """The segments of a text. Tokens that follow one another, such as those of an image, stay together."""
        start = 0
        if self._pattern is not None:
            for match in self._pattern.finditer(text):
                cut = match.start()
                if cut > start and match.group(1) in self._usable:
                    yield text[start:cut]
                    start = cut
        yield text[start:]


class SegmentCache:
    """Tokens (packed u32) by segment: a pure function of its text, so whoever needs it may use it.

    The least recently used go when texts and tokens take more than `capacity_bytes`.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.bytes = 0
        self._tokens: OrderedDict[str, bytes] = OrderedDict()

    def get(self, segment: str) -> bytes | None:
        tokens = self._tokens.get(segment)
        if tokens is not None:
            self._tokens.move_to_end(segment)
        return tokens

    def put(self, segment: str, tokens: bytes) -> None:
        if segment in self._tokens or _size(segment, tokens) > self.capacity_bytes:
            return
        self._tokens[segment] = tokens
        self.bytes += _size(segment, tokens)
        while self.bytes > self.capacity_bytes:
            self.bytes -= _size(*self._tokens.popitem(last=False))

    def check(self) -> None:
        assert self.bytes == sum(_size(*entry) for entry in self._tokens.items()) <= self.capacity_bytes


def encode_all(library: Library, texts: Sequence[str], *, special: bool = False) -> list[bytes]:
    """Packed tokens of each text. Lets go of the interpreter while it works."""
    return [
        array("I", encoded.ids).tobytes()
        for encoded in library.encode_batch_fast(list(texts), add_special_tokens=special)
    ]


def _size(segment: str, tokens: bytes) -> int:
    return sys.getsizeof(segment) + len(tokens) + _ENTRY_BYTES


def _first_word_rule(value: Any) -> bool:
    """Whether something in a normaliser or pre-tokeniser adds to the beginning of a text."""
    if isinstance(value, Mapping):
        kind = value.get("type")
        if kind == "Prepend" or value.get("add_prefix_space") is True:
            return True
        if kind == "Metaspace" and value.get("prepend_scheme", "always") != "never":
            return True
        return any(map(_first_word_rule, value.values()))
    return isinstance(value, list) and any(map(_first_word_rule, value))
