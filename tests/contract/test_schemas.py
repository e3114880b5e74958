"""Every message: readable by anybody, tolerant of additions, and nothing but RejectedMessage for hostile bytes."""

import json
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schemas.codec import VERSION, Decoder, RejectedMessage, encode
from tests.contract.messages import DECODERS, GOLDEN, filled, valid

GOLDEN_BYTES: dict[str, str] = json.loads(GOLDEN.read_text())
every_message = pytest.mark.parametrize("name", sorted(DECODERS))
any_message = st.sampled_from(sorted(DECODERS))
many = settings(max_examples=400, suppress_health_check=list(HealthCheck), deadline=None)

trees = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)


def reason_of(decoder: Decoder[Any], data: bytes, *, as_json: bool = False) -> str:
    """Decode: "" when it is a message, else why it was rejected; whatever else is raised fails the test."""
    rejection: RejectedMessage | None = None
    try:
        decoder.decode_json(data) if as_json else decoder.decode(data)
    except RejectedMessage as rejected:
        rejection = rejected
    if rejection is None:
        return ""
    assert rejection.reason in ("version", "schema", "bytes")
    assert decoder.kind.__name__ in str(rejection)
    return rejection.reason


@given(any_message, st.data())
@many
def test_valid_maps_decode_and_encode_to_plain_msgpack(name: str, data: st.DataObject) -> None:
    decoder = DECODERS[name]
    message = decoder.decode(msgpack.packb(data.draw(valid(decoder.kind))))
    again = encode(message)
    assert decoder.decode(again) == message
    plain = msgpack.unpackb(again, strict_map_key=False)
    assert plain["v"] == VERSION
    builtins = msgspec.to_builtins(message, builtin_types=(bytes,))
    assert plain == msgpack.unpackb(msgpack.packb(builtins), strict_map_key=False)


@every_message
def test_golden_bytes_still_mean_the_same(name: str) -> None:
    data = bytes.fromhex(GOLDEN_BYTES[name])
    recorded = msgpack.unpackb(data, raw=False)
    assert _same(msgspec.to_builtins(DECODERS[name].decode(data), builtin_types=(bytes,)), recorded)


def _same(now: Any, then: Any) -> bool:
    """Whether everything recorded then is there now, unchanged; keys added since are fine."""
    if isinstance(then, dict):
        return all(key in now and _same(now[key], value) for key, value in then.items())
    if isinstance(then, list):
        return len(now) == len(then) and all(map(_same, now, then))
    return bool(now == then)


def test_every_message_has_golden_bytes() -> None:
    missing = sorted(set(DECODERS) - set(GOLDEN_BYTES))
    assert missing == [], "record them: python -m tests.contract.messages"


@every_message
def test_case_41_an_added_key_is_ignored(name: str) -> None:
    decoder = DECODERS[name]
    data = msgpack.packb(filled(decoder.kind) | {"new": {"deep": [1, None, b"x"]}})
    assert decoder.decode(data) == decoder.decode(msgpack.packb(filled(decoder.kind)))


@every_message
def test_case_41_a_missing_key_is_named(name: str) -> None:
    decoder = DECODERS[name]
    required = [f.encode_name for f in msgspec.structs.fields(decoder.kind) if f.required]
    for key in required:
        cut = {k: v for k, v in filled(decoder.kind).items() if k != key}
        with pytest.raises(RejectedMessage, match=f"`{key}`") as caught:
            decoder.decode(msgpack.packb(cut))
        assert caught.value.reason == "schema"


@every_message
@pytest.mark.parametrize("version", [0, 2, 99, 2**63])
def test_case_41_an_unknown_version_is_rejected_and_both_named(name: str, version: int) -> None:
    decoder = DECODERS[name]
    for payload in ({"v": version}, filled(decoder.kind) | {"v": version}):
        with pytest.raises(RejectedMessage, match=f"version {version}, this service reads {VERSION}") as caught:
            decoder.decode(msgpack.packb(payload))
        assert caught.value.reason == "version"


@given(any_message, st.binary(max_size=200))
@many
def test_hostile_random_bytes(name: str, data: bytes) -> None:
    reason_of(DECODERS[name], data)
    reason_of(DECODERS[name], data, as_json=True)


@given(any_message, st.data())
@many
def test_hostile_values_in_every_field(name: str, data: st.DataObject) -> None:
    broken = filled(DECODERS[name].kind)
    for key in data.draw(st.lists(st.sampled_from(sorted(broken)), min_size=1, max_size=3)):
        broken[key] = data.draw(trees)
    reason_of(DECODERS[name], msgpack.packb(broken))


@given(any_message, st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), max_size=4), st.integers(0, 2000))
@many
def test_hostile_changes_of_a_good_message(name: str, changes: list[tuple[int, int]], cut: int) -> None:
    good = bytearray(msgpack.packb(filled(DECODERS[name].kind)))
    for place, value in changes:
        good[place % len(good)] = value
    reason_of(DECODERS[name], bytes(good))
    reason_of(DECODERS[name], bytes(good[: cut % len(good)]))
    reason_of(DECODERS[name], bytes(good) + b"\x00")


HOSTILE_VALUES = {
    "nested 20,000 deep": b"\x91" * 20_000,
    "list of 4 billion": b"\xdd\xff\xff\xff\xff",
    "map of 4 billion": b"\xdf\xff\xff\xff\xff",
    "4 GB of bytes": b"\xc6\xff\xff\xff\xff",
    "4 GB of text": b"\xdb\xff\xff\xff\xff",
    "not UTF-8": b"\xa2\xff\xfe",
    "an extension": b"\xd4\x05\x00",
    "no type": b"\xc1",
}


@every_message
@pytest.mark.parametrize("value", HOSTILE_VALUES.values(), ids=HOSTILE_VALUES)
def test_hostile_nesting_and_sizes_are_rejected_at_once(name: str, value: bytes) -> None:
    decoder = DECODERS[name]
    assert reason_of(decoder, value) in ("bytes", "schema")
    for key in filled(decoder.kind):
        inside = b"\x82" + msgpack.packb("v") + msgpack.packb(1) + msgpack.packb(key) + value
        assert reason_of(decoder, inside) in ("bytes", "schema")
    reason_of(decoder, b"\x81" + msgpack.packb("unknown") + value)


@pytest.mark.parametrize(
    "text",
    [b'{"v":1e400}', b'{"v":' + b"9" * 5000 + b"}", b'{"v":1,"z":' + b"[" * 20_000, b'"\\ud800"', b"\xff", b"", b"nul"],
)
def test_hostile_json(text: bytes) -> None:
    for decoder in DECODERS.values():
        assert reason_of(decoder, text, as_json=True) in ("bytes", "schema")


@every_message
def test_no_number_that_is_not_one(name: str) -> None:
    """A NaN would spread through every mean it enters: no field of time, duration or size takes it."""
    decoder = DECODERS[name]
    for field in msgspec.inspect.type_info(decoder.kind).fields:
        if isinstance(field.type, msgspec.inspect.FloatType) and field.type.ge is not None:
            for bad in (float("nan"), float("inf"), float("-inf")):
                broken = filled(decoder.kind) | {field.encode_name: bad}
                assert reason_of(decoder, msgpack.packb(broken)) == "schema", field.name
