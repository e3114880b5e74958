"""`ei tail`: which subjects, which messages, and how they look."""

import json

import msgpack
import pytest

from schemas.branch import BranchEvent, BranchEventType
from schemas.channels import CHANNELS, Channel
from schemas.codec import encode
from schemas.kv import ChangeType, KvLocation, LocationChange, Tier
from schemas.phase import Phase, PhaseState, SwitchState
from schemas.subjects import Subjects
from services.bus import Delivery
from services.cli.tail import Filter, line_of, patterns
from tests.contract.messages import filled

SUBJECTS = Subjects()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, ["ei.p0.>"]),
        ("telemetry.node", ["ei.p0.telemetry.node", "ei.p0.telemetry.node.>"]),
        ("planner.decision", ["ei.p0.planner.decision", "ei.p0.planner.decision.>"]),
        ("ei.p1.serve.>", ["ei.p1.serve.>"]),
    ],
)
def test_topics_and_whole_subjects(given: str | None, expected: list[str]) -> None:
    assert patterns(SUBJECTS, given) == expected


def shown(delivery: Delivery, **wanted: str) -> dict[str, object] | None:
    line = line_of(delivery, Filter(**wanted))
    return None if line is None else json.loads(line.partition(" ")[2])


def test_a_message_is_shown_decoded_and_packed_keys_by_their_size() -> None:
    change = LocationChange(type=ChangeType.STORED, tier=Tier.L2, hashes=bytes(24))
    message = KvLocation(node="node-0", incarnation=1, seq=2, changes=[change])
    line = shown(Delivery(SUBJECTS.kv_location("node-0"), encode(message)))
    assert line is not None
    assert line["changes"] == [{"type": "stored", "tier": "l2", "hashes": "<24 bytes>"}]


@pytest.mark.parametrize("channel", [each for each in CHANNELS if each.message is not None], ids=lambda each: each.name)
def test_every_message_of_the_wire_is_decoded(channel: Channel) -> None:
    assert channel.message is not None
    subject = channel.address.format(partition="p0", **dict.fromkeys(channel.parameters[1:], "n1"))
    if channel.name == "branchEvent":
        subject = SUBJECTS.branch_event("b")
    sent = filled(channel.message) | ({"tenant": ""} if channel.name == "branchEvent" else {})
    line = shown(Delivery(subject, msgpack.packb(sent)))
    assert line is not None
    assert line.keys() == sent.keys()


def test_a_branch_event_in_json_is_shown_like_any_other() -> None:
    data = b'{"v": 1, "id": "e", "t": 1, "branch": "b", "type": "open"}'
    line = shown(Delivery(SUBJECTS.branch_event("b"), data, headers={"content-type": "application/json"}))
    assert line is not None
    assert (line["id"], line["type"]) == ("e", "open")


def test_filters_by_node_and_by_branch() -> None:
    state = PhaseState(
        id="s", t=0.0, node="node-1", phase=Phase.DECODE, epoch=1, state=SwitchState.SERVING, took_s=None
    )
    event = BranchEvent(id="e", t=0.0, branch="b", type=BranchEventType.OPEN)
    of_node = Delivery(SUBJECTS.phase_state("node-1"), encode(state))
    of_branch = Delivery(SUBJECTS.branch_event("b"), encode(event))
    assert shown(of_node, node="node-1")
    assert shown(of_node, node="node-2") is None
    assert shown(of_branch, branch="b")
    assert shown(of_branch, branch="c") is None
    assert shown(of_node, branch="b") is None


def test_a_message_that_cannot_be_read_says_why() -> None:
    line = shown(Delivery(SUBJECTS.phase_state("node-1"), b"\xc1"))
    assert line is not None
    assert line["rejected"] == "bytes"


def test_subjects_without_a_known_message_show_their_size() -> None:
    assert shown(Delivery("ei.p0.node.who", b"1234")) == {"bytes": 4}
    assert line_of(Delivery("$SRV.PING", b""), Filter()) is None
