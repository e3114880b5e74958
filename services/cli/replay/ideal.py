"""The ideal hit, exact on the client's side: as if all nodes shared unlimited KV."""

from schemas.block_key import block_digests
from services.cli.replay.tokens import Tokens

KEY_BYTES = 16
"""Leading bytes of a digest that are remembered; 128 bits do not collide by chance."""


class IdealCache:
    """Every block whose KV some request has produced so far, generated tokens included."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._known: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._known)

    def open(self, prompt: Tokens) -> "IdealRequest":
        """A request arrives now with `prompt`."""
        digests = block_digests(prompt.tobytes(), self.block_size)
        blocks = 0
        for digest in digests:
            if digest[:KEY_BYTES] not in self._known:
                break
            blocks += 1
        usable = (len(prompt) - 1) // self.block_size
        return IdealRequest(self, self._known, prompt, digests, min(blocks, usable) * self.block_size)


class IdealRequest:
    """One request. `ideal_tokens`: prompt tokens whose KV existed when it arrived, in full blocks.

    The last prompt token is always computed, so a prompt of n tokens reuses at most (n - 1) // block_size blocks.
    """

    def __init__(
        self, cache: IdealCache, known: set[bytes], prompt: Tokens, digests: list[bytes], ideal_tokens: int
    ) -> None:
        self.ideal_tokens = ideal_tokens
        self._size = cache.block_size
        self._known = known
        self._prompt_digests = digests
        self._last = digests[-1] if digests else b""
        self._open = prompt[len(digests) * self._size :]
        self._newest: int | None = None

    def generated(self, tokens: Tokens) -> None:
        """Tokens arrived: KV exists for the prompt and for every generated token but the newest, never fed yet."""
        if self._prompt_digests:
            self._known.update(digest[:KEY_BYTES] for digest in self._prompt_digests)
            self._prompt_digests = []
        if not tokens:
            return
        if self._newest is not None:
            self._open.append(self._newest)
        self._open.extend(tokens[:-1])
        self._newest = tokens[-1]
        full = len(self._open) // self._size * self._size
        if full:
            digests = block_digests(self._open[:full].tobytes(), self._size, self._last)
            self._known.update(digest[:KEY_BYTES] for digest in digests)
            self._last = digests[-1]
            del self._open[:full]
