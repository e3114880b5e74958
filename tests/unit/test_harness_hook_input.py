"""What a hook's input means for branches: a recording of Claude Code's hooks, and everything else it may be."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.branch import BRANCH_EVENT, BranchEventType
from schemas.subjects import Subjects
from services.harness.events import TYPES, branch_event
from services.harness.hook_input import Said, read

RECORDED = Path(__file__).parents[1] / "fixtures" / "harness" / "claude_code_hooks.jsonl"
PRINTABLE = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=200)
SESSION, AGENT = "10f27bbe-1a52-ba04-1c0f-b9160f965c42", "a626853f7e4096ff4"


def test_a_recorded_session() -> None:
    said = [event for line in RECORDED.read_text().splitlines() for event in read(json.loads(line))]
    assert [event for event in said if event.kind != "keepalive"] == [
        Said(SESSION, "open"),
        Said(f"{SESSION}/{AGENT}", "subagent", SESSION),
        Said(f"{SESSION}/{AGENT}", "end"),
        Said(SESSION, "end"),
        Said(SESSION, "open"),
        Said(SESSION, "compact"),
        Said(SESSION, "end"),
    ], "one compaction, and no end of the agent that a compaction stops without ever starting it"
    assert {event.branch for event in said if event.kind == "keepalive"} == {SESSION}


def test_a_fork_names_its_parent_when_the_harness_does() -> None:
    given = {"hook_event_name": "SessionStart", "session_id": "b", "source": "fork"}
    assert read(given | {"parent_session_id": "a"}) == [Said("b", "fork", "a")]
    assert read(given) == [Said("b", "open")]


def test_an_event_of_ours_passes_as_it_stands() -> None:
    given = {"branch": "b", "type": "compact", "version": 3, "event_id": "e"}
    assert read(given) == [Said("b", "compact", None, 3, "e")]


@pytest.mark.parametrize("given", [None, [], "x", {}, {"type": "end"}, {"hook_event_name": "SessionEnd"}])
def test_what_is_no_hook_is_said_to_be_none(given: object) -> None:
    with pytest.raises(ValueError, match=r"."):
        read(given)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
words = st.sampled_from(
    ["SessionStart", "SubagentStart", "SubagentStop", "SessionEnd", "PreToolUse", "Other", "compact"]
)
hooks = st.dictionaries(
    st.sampled_from(["hook_event_name", "session_id", "agent_id", "agent_type", "source", "branch", "type", "version"]),
    words | json_values,
)


@given(given=hooks | json_values)
def test_any_input_gives_events_the_schema_takes_or_a_value_error(given: object) -> None:
    try:
        events = [branch_event(s.branch, s.kind, parent=s.parent, version=s.version) for s in read(given)]
    except ValueError:
        return
    for event in events:
        try:
            decoded = BRANCH_EVENT.decode_json(event.data)
        except ValueError:
            assert b'"version": -' in event.data, "a negative version is refused by whoever reads it"
            continue
        assert event.subject == Subjects().branch_event(decoded.branch)


@given(branch=PRINTABLE, tenant=st.text(max_size=20), kind=st.sampled_from(TYPES))
def test_the_wire_is_the_schemas(branch: str, tenant: str, kind: str) -> None:
    try:
        branch.encode(), tenant.encode()
    except UnicodeEncodeError:
        return
    event = branch_event(branch, kind, parent=f"p{branch}", version=2, tenant=tenant, source="test")
    decoded = BRANCH_EVENT.decode_json(event.data)
    assert (decoded.branch, decoded.type, decoded.parent, decoded.version) == (branch, kind, f"p{branch}", 2)
    assert (decoded.tenant, decoded.source, decoded.id) == (tenant, "test", event.headers["Nats-Msg-Id"])
    assert event.subject == Subjects().branch_event(branch, tenant)


def test_every_type_but_the_routers_own_can_be_said() -> None:
    assert set(TYPES) == set(BranchEventType) - {BranchEventType.CONTEXT}
    for bad in ({"branch": "b", "kind": "context"}, {"branch": "", "kind": "open"}, {"branch": "b", "kind": "fork"}):
        with pytest.raises(ValueError, match=r"."):
            branch_event(**bad)
