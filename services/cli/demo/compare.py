"""The same requests on one plain engine: every greedy token must be equal."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.cli.demo.act import Played


class Reference(Protocol):
    """Answers prompts one by one, the same for the same prompt."""

    async def start(self) -> None: ...

    async def generate(self, prompt: list[int], length: int) -> tuple[list[int], int]:
        """The greedy continuation of `prompt` by `length` tokens, end-of-sequence ignored; and how many tokens of the
        prompt were reused."""
        ...

    async def stop(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Difference:
    """A request whose answer differs from the reference, first at token `index`."""

    name: str
    index: int
    got: int | None
    expected: int | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """What asking everything again has shown, and what it cost there."""

    differences: list[Difference]
    prompt_tokens: int
    cached_tokens: int
    took_s: float


async def compare(played: Sequence[Played], reference: Reference, progress: Callable[[int], None]) -> Comparison:
    """Ask the reference everything that was played, one after the other; `progress` is told how many are done."""
    differences: list[Difference] = []
    cached, begun = 0, time.monotonic()
    for number, one in enumerate(played, 1):
        expected, reused = await reference.generate(list(one.prompt), len(one.answer))
        cached += reused
        found = first_difference(list(one.answer), expected)
        if found is not None:
            got = one.answer[found] if found < len(one.answer) else None
            differences.append(Difference(one.name, found, got, expected[found] if found < len(expected) else None))
        progress(number)
    prompt = sum(len(one.prompt) for one in played)
    return Comparison(differences, prompt, cached, time.monotonic() - begun)


def first_difference(got: list[int], expected: list[int]) -> int | None:
    """The first index at which two answers differ (also by ending); None when they are equal."""
    for index, (left, right) in enumerate(zip(got, expected, strict=False)):
        if left != right:
            return index
    return None if len(got) == len(expected) else min(len(got), len(expected))
