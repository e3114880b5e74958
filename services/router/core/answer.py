"""The answer as it grows: every token index once and in order, whoever sends it and however often."""

from array import array

from schemas.block_key import token_list


class Answer:
    """Tokens [0, len) are known. A message that starts beyond that leaves a gap: it is not taken, and asked for again.

    `total` is known once a leg said how long the answer is; it never exceeds `limit` tokens.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.tokens = array("I")
        self.total: int | None = None
        self.gap = False

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def complete(self) -> bool:
        return self.total is not None and len(self.tokens) >= self.total

    def take(self, first: int, packed: bytes) -> list[int]:
        """Take the tokens [first, first + n) of the answer; returns those that are new. ValueError: no whole tokens."""
        fresh, have = token_list(packed), len(self.tokens)
        if first > have:
            self.gap = True
            return []
        del fresh[: have - first]
        del fresh[max(0, (self.limit if self.total is None else self.total) - have) :]
        self.tokens.extend(fresh)
        if fresh:
            self.gap = False
        return fresh

    def ends_at(self, total: int) -> None:
        """The answer has `total` tokens; what is missing of them is a gap."""
        if self.total is None:
            self.total = min(self.limit, max(total, len(self.tokens)))
            self.gap = not self.complete

    def reopen(self) -> None:
        """Another attempt goes on after the tokens known so far."""
        self.total, self.gap = None, False

    def check(self) -> None:
        assert len(self.tokens) <= (self.limit if self.total is None else self.total) <= self.limit
        assert not (self.complete and self.gap)
