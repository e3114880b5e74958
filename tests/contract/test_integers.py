"""Integers of the wire: each has its limits, and one beyond them is a rejected message, never a crash."""

import base64
import json
from collections.abc import Iterator
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import inspect

from schemas.codec import RejectedMessage, encode
from tests.contract.messages import DECODERS, filled

KEYS = frozenset({"tip", "base", "parent", "digest"})
"""Short keys are any uint64; `checked_key` says so, because `Meta` cannot."""
EXTREMES = [
    sign * (2**bits + more) for bits in (0, 31, 32, 53, 63, 64, 100, 3000) for more in (-1, 0, 1) for sign in (1, -1)
]
every_message = pytest.mark.parametrize("name", sorted(DECODERS))


def integers(info: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every integer within a type, by its path."""
    if isinstance(info, inspect.IntType):
        yield path, info
    for field in getattr(info, "fields", ()):
        yield from integers(field.type, f"{path}.{field.encode_name}")
    for inner in (*getattr(info, "types", ()), *getattr(info, "item_types", ())):
        yield from integers(inner, path)
    for key in ("item_type", "value_type"):
        if hasattr(info, key):
            yield from integers(getattr(info, key), path)


def unlimited(kind: type) -> list[str]:
    found = integers(inspect.type_info(kind), kind.__name__)
    return [path for path, info in found if info.ge is None or info.le is None]


@every_message
def test_every_integer_of_the_wire_has_its_limits(name: str) -> None:
    left = [path for path in unlimited(DECODERS[name].kind) if path.rpartition(".")[2] not in KEYS | {"v"}]
    assert left == []


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where in a message integers stand."""
    if isinstance(value, int) and not isinstance(value, bool) and path != ("v",):
        yield path
    elif isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(inner, (*path, key))


def changed(message: dict[str, Any], given: dict[tuple[Any, ...], int]) -> dict[str, Any]:
    """The message with these integers in these places."""
    copy = msgpack.unpackb(msgpack.packb(message))
    for path, number in given.items():
        holder = copy
        for key in path[:-1]:
            holder = holder[key]
        holder[path[-1]] = number
    return copy


def on_the_wire(message: dict[str, Any]) -> Iterator[tuple[str, bytes]]:
    """As JSON, and as MessagePack if that has integers of this size."""
    yield "json", json.dumps(message, default=lambda value: base64.b64encode(value).decode()).encode()
    try:
        yield "msgpack", msgpack.packb(message)
    except OverflowError:
        return


@given(st.sampled_from(sorted(DECODERS)), st.data())
@settings(max_examples=1500, suppress_health_check=list(HealthCheck), deadline=None)
def test_an_extreme_integer_is_taken_whole_or_rejected(name: str, data: st.DataObject) -> None:
    good = filled(DECODERS[name].kind)
    where = list(places(good))
    number = st.sampled_from(EXTREMES) | st.integers()
    hostile = changed(good, data.draw(st.dictionaries(st.sampled_from(where), number, max_size=3)) if where else {})
    for form, sent in on_the_wire(hostile):
        decode = DECODERS[name].decode_json if form == "json" else DECODERS[name].decode
        try:
            taken = decode(sent)
        except RejectedMessage:
            continue
        assert DECODERS[name].decode(encode(taken)) == taken
        assert DECODERS[name].decode_json(msgspec.json.encode(taken)) == taken


@every_message
@pytest.mark.parametrize("number", [10**30, 2**64, -1 - 2**63], ids=["10^30", "2^64", "below -2^63"])
def test_beyond_64_bits_is_rejected_wherever_it_stands(name: str, number: int) -> None:
    good = filled(DECODERS[name].kind)
    for path in places(good):
        text = next(iter(on_the_wire(changed(good, {path: number}))))[1]
        with pytest.raises(RejectedMessage):
            DECODERS[name].decode_json(text)
