"""Sets of block offsets as flat lists of half-open intervals: [f0, t0, f1, t1, ...] with f0 < t0 < f1 < t1 < ...

Intervals are disjoint and never touch, so that two equal sets are equal lists.
"""

from bisect import bisect_left, bisect_right
from itertools import pairwise

Spans = list[int]


def add(spans: Spans, first: int, last: int) -> Spans:
    """Cover [first, last) in place; the part of it that was not covered before."""
    left, right = bisect_left(spans, first), bisect_right(spans, last)
    start = [] if left & 1 else [first]
    stop = [] if right & 1 else [last]
    gaps = [*start, *spans[left:right], *stop]
    spans[left:right] = start + stop
    return _without_empty(gaps)


def remove(spans: Spans, first: int, last: int) -> Spans:
    """Uncover [first, last) in place; the part of it that was covered before."""
    left, right = bisect_left(spans, first), bisect_right(spans, last)
    start = [first] if left & 1 else []
    stop = [last] if right & 1 else []
    covered = [*start, *spans[left:right], *stop]
    spans[left:right] = start + stop
    return _without_empty(covered)


def reach(spans: Spans, at: int) -> int:
    """The end of the interval that covers `at`, or `at` when none does."""
    index = bisect_right(spans, at)
    return spans[index] if index & 1 else at


def both(a: Spans, b: Spans) -> Spans:
    """What a and b have in common."""
    common: Spans = []
    i = j = 0
    while i < len(a) and j < len(b):
        first, last = max(a[i], b[j]), min(a[i + 1], b[j + 1])
        if first < last:
            common += (first, last)
        if a[i + 1] <= b[j + 1]:
            i += 2
        else:
            j += 2
    return common


def minus(a: Spans, b: Spans) -> Spans:
    """What a has and b has not."""
    rest = list(a)
    for i in range(0, len(b), 2):
        remove(rest, b[i], b[i + 1])
    return rest


def size(spans: Spans) -> int:
    """How many offsets are covered."""
    if len(spans) == 2:
        return spans[1] - spans[0]
    return sum(spans[1::2]) - sum(spans[0::2])


def check(spans: Spans) -> None:
    """Assert the form: even length, strictly ascending, nothing below zero."""
    assert len(spans) % 2 == 0, spans
    assert all(a < b for a, b in pairwise(spans)), spans
    assert not spans or spans[0] >= 0, spans


def _without_empty(pairs: Spans) -> Spans:
    if len(pairs) == 2:
        return pairs if pairs[0] < pairs[1] else []
    return [edge for i in range(0, len(pairs), 2) if pairs[i] < pairs[i + 1] for edge in pairs[i : i + 2]]
