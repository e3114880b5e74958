"""The codec: one map, one version, one error."""

import msgpack
import msgspec
import pytest

from schemas.branch import BRANCH_EVENT, BranchEvent, BranchEventType, decode_branch_event
from schemas.codec import RejectedMessage, encode
from schemas.kv import KV_LOCATION, ChangeType, KvLocation, LocationChange, Tier, keys_of
from schemas.phase import Phase, Split
from schemas.subjects import Subjects

SUBJECTS = Subjects()

EVENT = BranchEvent(id="e1", t=12.5, branch="b.1 *>", type=BranchEventType.FORK, parent="b.0")


def test_the_wire_is_a_plain_map_with_the_version_first() -> None:
    plain = msgpack.unpackb(encode(EVENT))
    assert next(iter(plain)) == "v"
    assert (plain["v"], plain["id"], plain["type"], plain["branch"]) == (1, "e1", "fork", "b.1 *>")


def test_json_is_read_as_well() -> None:
    text = b'{"v":1,"id":"e1","t":12.5,"branch":"b.1 *>","type":"fork","parent":"b.0"}'
    assert BRANCH_EVENT.decode_json(text) == EVENT


@pytest.mark.parametrize("header", ["content-type", "Content-Type"])
@pytest.mark.parametrize("value", ["application/json", "Application/JSON; charset=utf-8"])
def test_branch_events_are_json_when_their_header_says_so(header: str, value: str) -> None:
    text = b'{"id":"e1","t":12.5,"branch":"b.1 *>","type":"fork","parent":"b.0"}'
    subject = SUBJECTS.branch_event(EVENT.branch)
    assert decode_branch_event(text, {header: value}, subject) == EVENT
    assert decode_branch_event(encode(EVENT), {}, subject) == EVENT
    assert decode_branch_event(encode(EVENT), {header: "application/vnd.msgpack"}, subject) == EVENT
    with pytest.raises(RejectedMessage):
        decode_branch_event(text, {}, subject)


def test_a_branch_event_must_be_of_the_tenant_of_its_subject() -> None:
    theirs = msgspec.structs.replace(EVENT, tenant="acme")
    assert decode_branch_event(encode(theirs), {}, SUBJECTS.branch_event(EVENT.branch, "acme")) == theirs
    for event, tenant in ((theirs, ""), (theirs, "other"), (EVENT, "acme")):
        with pytest.raises(RejectedMessage, match=r"tenant .* does not speak on ei\.p0\.branch\.event") as caught:
            decode_branch_event(encode(event), {}, SUBJECTS.branch_event(EVENT.branch, tenant))
        assert caught.value.reason == "tenant"


def test_the_version_may_be_left_out() -> None:
    assert BRANCH_EVENT.decode(msgpack.packb({"id": "e", "t": 1, "branch": "b", "type": "end"})).v == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"branch": ""}, ["length >= 1", "$.branch"]),
        ({"branch": "x" * 257}, ["length <= 256", "$.branch"]),
        ({"type": "explode"}, ["Invalid enum value 'explode'", "$.type"]),
        ({"version": -1}, [">= 0", "$.version"]),
        ({"t": "now"}, ["Expected `float`, got `str`", "$.t"]),
        ({"keys": b"1234567"}, ["7 bytes"]),
    ],
)
def test_a_rejection_says_what_and_where(change: dict[str, object], words: list[str]) -> None:
    fields = {"v": 1, "id": "e", "t": 1, "branch": "b", "type": "end"} | change
    with pytest.raises(RejectedMessage) as caught:
        BRANCH_EVENT.decode(msgpack.packb(fields))
    assert caught.value.reason == "schema"
    assert [word for word in words if word not in str(caught.value)] == []


def test_bytes_that_are_no_message_at_all() -> None:
    for data in (b"", b"\xc1", b"hello", encode(EVENT) + b"\x00"):
        with pytest.raises(RejectedMessage) as caught:
            BRANCH_EVENT.decode(data)
        assert caught.value.reason in ("bytes", "schema")


def test_keys_travel_as_packed_little_endian_words() -> None:
    change = LocationChange(type=ChangeType.STORED, tier=Tier.L2, hashes=(2**64 - 1).to_bytes(8, "little") + bytes(8))
    message = KvLocation(node="node-0", incarnation=1, seq=1, changes=[change])
    (received,) = KV_LOCATION.decode(encode(message)).changes
    assert keys_of(received.hashes).tolist() == [2**64 - 1, 0]


def test_moved_names_its_origin_as_from() -> None:
    change = LocationChange(type=ChangeType.MOVED, tier=Tier.L2, origin=Tier.L1)
    plain = msgpack.unpackb(encode(KvLocation(node="n", incarnation=1, seq=1, changes=[change])))
    assert plain["changes"] == [{"type": "moved", "tier": "l2", "from": "l1"}]


@pytest.mark.parametrize("text", ["4P5D", " 4p5d ", "0P1D", "256P512D"])
def test_a_split_reads_back(text: str) -> None:
    assert str(Split.parse(text)) == text.strip().upper()


@pytest.mark.parametrize("text", ["", "4P", "P5D", "-1P5D", "4P5DX", "4.0P5D", "9999999P1D"])
def test_what_is_no_split(text: str) -> None:
    with pytest.raises(ValueError, match="4P5D"):
        Split.parse(text)


def test_which_phase_serves_which() -> None:
    assert Phase.BOTH.serves(Phase.PREFILL)
    assert Phase.BOTH.serves(Phase.DECODE)
    assert Phase.PREFILL.serves(Phase.PREFILL)
    assert not Phase.PREFILL.serves(Phase.DECODE)
