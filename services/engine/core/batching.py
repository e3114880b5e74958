"""What one timed iteration contains: chunked prefill in queue order, continuous batching in decode.

Used by the timed engine in real time and by the simulator in virtual time; it knows no clock and no KV.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from services.engine.core.timing import DecodeTerms, PrefillTerms, attention_pairs


@dataclass(slots=True)
class PrefillWork:
    """A prompt in prefill: `done` tokens have KV on the device (cached ones included), `restored` came from host.

    `media`: how many of its media are still to be looked at.
    """

    prompt_tokens: int
    done: int
    restored_tokens: int = 0
    media: int = 0

    @property
    def left(self) -> int:
        return self.prompt_tokens - self.done

    def check(self) -> None:
        assert 0 <= self.restored_tokens <= self.prompt_tokens, (self.restored_tokens, self.prompt_tokens)
        assert 0 <= self.done <= self.prompt_tokens, (self.done, self.prompt_tokens)


class Chunk(msgspec.Struct, frozen=True):
    """Tokens [work.done, work.done + tokens) are computed in this iteration."""

    work: PrefillWork
    tokens: int


class PrefillBatch(msgspec.Struct, frozen=True):
    """One prefill iteration; `cached_tokens` is what its chunks attend to besides their own tokens."""

    chunks: list[Chunk]
    terms: PrefillTerms
    cached_tokens: int


def compose_prefill(waiting: Iterable[PrefillWork], batch_tokens: int) -> PrefillBatch | None:
    """Fill one iteration with at most `batch_tokens` uncached tokens, in the given order; None if nothing waits.

    Only the last prompt in a batch may be cut. Restored tokens and media are charged once, with the first chunk of a
    prompt; they cost no room in the batch.
    """
    chunks: list[Chunk] = []
    room, pairs, restored, cached, media = batch_tokens, 0.0, 0, 0, 0
    for work in waiting:
        if room == 0:
            break
        tokens = min(work.left, room)
        chunks.append(Chunk(work, tokens))
        room -= tokens
        pairs += attention_pairs(tokens, work.done)
        cached += work.done
        restored += work.restored_tokens
        media += work.media
    if not chunks:
        return None
    terms = PrefillTerms(len(chunks), batch_tokens - room, pairs, restored, media)
    return PrefillBatch(chunks, terms, cached)


def finish_prefill(batch: PrefillBatch) -> list[PrefillWork]:
    """Account for a prefill iteration that has run; the prompts that are done now, in order."""
    for chunk in batch.chunks:
        chunk.work.done += chunk.tokens
        chunk.work.restored_tokens = chunk.work.media = 0
    return [chunk.work for chunk in batch.chunks if chunk.work.left == 0]


@dataclass(slots=True)
class DecodeWork:
    """A running request: `context_tokens` have KV, `left` output tokens may still come, `credit` is the fraction of a
    token that speculation has earned so far (0 <= credit < 1)."""

    context_tokens: int
    left: int
    credit: float = 0.0

    def check(self) -> None:
        assert self.left >= 0, self.left
        assert 0.0 <= self.credit < 1.0, self.credit


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """One decode iteration over all of `works`."""

    works: list[DecodeWork]
    terms: DecodeTerms


def compose_decode(running: Iterable[DecodeWork], max_running: int) -> DecodeBatch | None:
    """The oldest `max_running` running requests; None if none runs."""
    works = [work for work, _ in zip(running, range(max_running), strict=False)]
    if not works:
        return None
    return DecodeBatch(works, DecodeTerms(len(works), sum(work.context_tokens for work in works)))


def accept_tokens(work: DecodeWork, accepted_per_iteration: float) -> int:
    """How many output tokens this iteration gives one request; at least one, `accepted_per_iteration` on average."""
    work.credit += max(1.0, accepted_per_iteration)
    tokens = min(int(work.credit), work.left)
    work.credit -= int(work.credit)
    work.context_tokens += tokens
    work.left -= tokens
    return tokens
