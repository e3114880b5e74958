"""The same requests on one plain engine: every greedy token must be equal."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.cli.demo.act import Played


class Reference(Protocol):
    """Answers prompts one by one, the same for the same prompt."""

    async def start(self) -> None: ...

    async def generate(self, prompt: list[int], length: int) -> list[int]:
        """The greedy continuation of `prompt` by `length` tokens, end-of-sequence ignored."""
        ...

    async def stop(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Difference:
    """A request whose answer differs from the reference, first at token `index`."""

    name: str
    index: int
    got: int | None
    expected: int | None


async def compare(played: Sequence[Played], reference: Reference, progress: Callable[[int], None]) -> list[Difference]:
    """Ask the reference everything that was played; `progress` is told how many are done."""
    differences = []
    for number, one in enumerate(played, 1):
        expected = await reference.generate(list(one.prompt), len(one.answer))
        found = first_difference(list(one.answer), expected)
        if found is not None:
            got = one.answer[found] if found < len(one.answer) else None
            differences.append(Difference(one.name, found, got, expected[found] if found < len(expected) else None))
        progress(number)
    return differences


def first_difference(got: list[int], expected: list[int]) -> int | None:
    """The first index at which two answers differ (also by ending); None when they are equal."""
    for index, (left, right) in enumerate(zip(got, expected, strict=False)):
        if left != right:
            return index
    return None if len(got) == len(expected) else min(len(got), len(expected))
