"""Words on copies as messages: in order, joined, within the size, values after the bits of their message."""

from itertools import pairwise
from typing import Any

from schemas.kv import ReferenceChange, ValueChange
from services.directory.announcer import Announcer
from services.directory.core.effects import ReferencesChanged, ValuesChanged


def pack(*keys: int) -> bytes:
    return b"".join(key.to_bytes(8, "little") for key in keys)


def messages(changes: list[Any], largest: int = 1 << 20) -> list[Any]:
    nothing: Any = None
    return Announcer(nothing, nothing, 1, nothing, nothing)._messages("n", changes, largest)


def test_neighbours_that_say_the_same_are_joined_and_values_follow_bits() -> None:
    (message,) = messages(
        [
            ReferencesChanged("n", True, False, pack(1)),  # noqa: FBT003
            ReferencesChanged("n", True, False, pack(2)),  # noqa: FBT003
            ValuesChanged("n", 7, True, pack(1)),  # noqa: FBT003
            ValuesChanged("n", 7, True, pack(2)),  # noqa: FBT003
            ValuesChanged("n", 8, True, pack(2)),  # noqa: FBT003
        ]
    )
    assert message.changes == [ReferenceChange(referenced=True, hashes=pack(1, 2))]
    assert message.values == [
        ValueChange(value=7, referenced=True, hashes=pack(1, 2)),
        ValueChange(value=8, referenced=True, hashes=pack(2)),
    ]


def test_bits_said_after_a_value_go_into_the_next_message() -> None:
    first, second = messages(
        [ValuesChanged("n", 0, False, pack(1)), ReferencesChanged("n", True, False, pack(1))]  # noqa: FBT003
    )
    assert (first.changes, len(first.values)) == ([], 1)
    assert (len(second.changes), second.values) == (1, [])
    assert second.seq == first.seq + 1


def test_a_full_word_is_marked_on_its_first_message_only_and_none_is_too_large() -> None:
    everything = ReferencesChanged("n", False, False, b"", full=True)  # noqa: FBT003
    told = messages([everything, ValuesChanged("n", 9, True, pack(*range(10)))], largest=32)  # noqa: FBT003
    assert [message.full for message in told] == [True, False, False]
    assert all(len(worth.hashes) <= 32 for message in told for worth in message.values)
    assert b"".join(worth.hashes for message in told for worth in message.values) == pack(*range(10))
    assert all(b.seq == a.seq + 1 for a, b in pairwise(told))
