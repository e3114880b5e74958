"""What real harnesses send is recognised: recorded calls, one expectation per call."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.branch import BranchKind, Compaction
from services.router.core.identity import DIALECTS, Identity, identify
from services.router.core.identity_volatile import ATTRIBUTION, without_volatile

FIXTURES = Path(__file__).parents[1] / "fixtures" / "harness"
SIDE, SUB = BranchKind.TRANSIENT, BranchKind.SUBAGENT


def recorded(name: str) -> list[Identity]:
    """The identities of a recording's calls; a body field that was there but not recorded is a non-empty list."""
    found = []
    for line in (FIXTURES / f"{name}.jsonl").read_text().splitlines():
        call = json.loads(line)
        headers = {key.lower(): value for key, value in call["headers"].items()}
        body = {key: call.get(key, [{}]) for key in call["body_keys"]}
        found.append(identify("", headers, body))
    return found


def told(identity: Identity) -> tuple[str | None, str | None, int | None, BranchKind | None, Compaction | None]:
    return identity.branch, identity.parent, identity.version, identity.kind, identity.compaction


def test_claude_code_says_session_and_agent() -> None:
    session, agent, forked = "5bc86253-c951-b309-2b4f-776e7345f60c", "ae57871385d28257c", "d5d057a7"
    calls = recorded("claude_code_default")
    main = (session, None, None, None, None)
    assert [told(call) for call in calls[:5]] == [
        main,
        (f"{session}/{agent}", session, None, SUB, None),
        main,
        main,
        main,
    ]
    assert calls[5].branch is not None
    assert calls[5].branch.startswith(forked), "a forked session has an id of its own, and says no parent"
    assert {call.dialect for call in calls} == {"claude-code"}
    assert {call.family for call in calls[:5]} == {session}
    assert all(call.explicit for call in calls)


def test_claude_codes_hints_name_the_summary_request() -> None:
    session = "168040d4-1474-50c2-6027-cbddd3d9eb22"
    calls = recorded("claude_code_gateway_hints")
    assert [(call.branch, call.kind, call.compaction) for call in calls[:5]] == [
        (session, None, None),
        (f"{session}/a05fe4b00bcf9fff1", SUB, None),
        (session, None, None),
        (session, SIDE, Compaction.SUMMARY),
        (session, None, None),
    ]


CLAUDE = {"x-claude-code-session-id": "s"}
TOOLS = {"tools": [{"name": "Bash"}]}


@pytest.mark.parametrize(
    ("hints", "body", "expected"),
    [
        ({"x-claude-code-context-compacted": "auto"}, TOOLS, ("s", None, None, None, Compaction.DONE)),
        ({"x-claude-code-compaction": "auto"}, TOOLS, ("s", None, None, SIDE, Compaction.SUMMARY)),
        ({"x-claude-code-request-class": "auxiliary"}, TOOLS, ("s", None, None, SIDE, None)),
        ({"x-claude-code-request-class": "side_reply"}, TOOLS, ("s", None, None, SIDE, None)),
        ({}, {}, ("s", None, None, SIDE, None)),
        (
            {"x-claude-code-agent-id": "b", "x-claude-code-parent-agent-id": "a"},
            TOOLS,
            ("s/b", "s/a", None, SUB, None),
        ),
        (
            {"x-claude-code-agent-id": "b", "x-claude-code-agent-type": "fork"},
            TOOLS,
            ("s/b", "s", None, BranchKind.FORK, None),
        ),
    ],
)
def test_claude_codes_other_words(hints: dict[str, str], body: dict[str, Any], expected: tuple[object, ...]) -> None:
    assert told(identify("", CLAUDE | hints, body)) == expected


def test_codexs_window_is_the_version() -> None:
    thread = "dd5cba4e-a909-f21b-eead-7971e6727317"
    calls = recorded("codex")
    turn = (thread, None, 0, None, None)
    summary = (thread, None, 0, SIDE, Compaction.SUMMARY)
    assert [told(call) for call in calls] == [turn, turn, turn, summary, (thread, None, 1, None, None)]


def test_codex_is_known_by_its_body_when_a_proxy_drops_headers() -> None:
    for line in (FIXTURES / "codex.jsonl").read_text().splitlines():
        call = json.loads(line)
        whole = identify("", {key.lower(): value for key, value in call["headers"].items()}, call)
        assert told(identify("", {}, call)) == told(whole)


def test_codexs_sub_agents_have_threads_of_their_own_in_the_root_session() -> None:
    headers = {
        "session-id": "root",
        "thread-id": "child",
        "x-codex-window-id": "child:0",
        "x-codex-parent-thread-id": "root",
        "x-openai-subagent": "collab_spawn",
    }
    found = identify("", headers, {"prompt_cache_key": "root"})
    assert (found.branch, found.parent, found.kind, found.family) == ("child", "root", SUB, "root")
    forked = {"x-codex-turn-metadata": '{"forked_from_thread_id":"old","thread_id":"new"}'}
    assert told(identify("", forked, {})) == ("new", "old", None, BranchKind.FORK, None)
    side = headers | {"x-openai-subagent": "memory_consolidation"}
    assert identify("", side, {}).kind is SIDE


def test_opencodes_title_request_shares_the_id_and_is_a_side_request() -> None:
    main, child = "ses_6962a5b3ef8cffd73232c768e2", "ses_508323f652cd4fa207480c7edf"
    assert [told(call)[:4] for call in recorded("opencode")] == [
        (main, None, None, SIDE),
        (main, None, None, None),
        (child, main, None, None),
        (main, None, None, None),
    ]


@pytest.mark.parametrize(
    ("headers", "body", "dialect"),
    [
        ({"x-litellm-session-id": "f"}, {"prompt_cache_key": "x"}, "litellm"),
        ({"x-session-id": "f"}, {}, "session-header"),
        ({"x-session-affinity": "f"}, {}, "session-header"),
        ({}, {"session_id": "f"}, "session-field"),
        ({}, {"metadata": {"user_id": '{"device_id":"d","session_id":"f"}'}}, "user-id"),
        ({}, {"metadata": {"user_id": "user_1_account_2_session_f"}}, "user-id"),
        ({}, {"prompt_cache_key": "f"}, "prompt-cache-key"),
    ],
)
def test_ids_that_siblings_share_are_families_not_branches(
    headers: dict[str, str], body: dict[str, Any], dialect: str
) -> None:
    assert identify("t", headers, body) == Identity("t", family="f", dialect=dialect)


def test_dynamos_session_headers() -> None:
    headers = {"x-dynamo-session-id": "b", "x-dynamo-parent-session-id": "a", "x-dynamo-session-final": "true"}
    found = identify("", headers, {})
    assert (found.branch, found.parent, found.kind, found.end) == ("b", "a", None, True)


def test_our_own_words_come_before_any_harness() -> None:
    found = identify("", CLAUDE | {"x-ei-branch-id": "mine", "x-ei-branch-kind": "transient"}, {})
    assert (found.branch, found.kind, found.dialect) == ("mine", SIDE, "ei")


ids = st.one_of(st.text(max_size=300), st.sampled_from(["s", "a:1", "{}", '{"session_id": 5}', "{" * 400, "x" * 257]))
values = st.one_of(ids, st.none(), st.integers(), st.lists(st.integers(), max_size=2), st.dictionaries(ids, ids))
HEADERS = sorted(
    {
        *("x-claude-code-session-id", "x-claude-code-agent-id", "x-claude-code-parent-agent-id"),
        *("thread-id", "session-id", "x-codex-window-id", "x-codex-parent-thread-id", "x-codex-turn-metadata"),
        *("x-session-id", "x-parent-session-id", "x-dynamo-session-id", "x-litellm-session-id", "user-agent"),
    }
)
FIELDS = ["metadata", "client_metadata", "prompt_cache_key", "session_id", "tools", "system", "messages"]


@given(headers=st.dictionaries(st.sampled_from(HEADERS), ids), body=st.dictionaries(st.sampled_from(FIELDS), values))
def test_no_harness_is_refused_for_its_own_words(headers: dict[str, str], body: dict[str, Any]) -> None:
    found = identify("", headers, body)
    assert found.explicit == (found.branch is not None)
    assert found.branch is None or found.parent != found.branch
    assert (found.dialect == "") == (found == Identity(""))
    without_volatile(body, [ATTRIBUTION])


def test_dialects_have_names() -> None:
    assert all(name for name, _ in DIALECTS)


BLOCK = {"type": "text", "text": f"{ATTRIBUTION} cc_version=1.2.3.abc; cc_entrypoint=cli;"}
RULES = {"type": "text", "text": "rules"}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"system": [BLOCK, RULES]}, {"system": [RULES]}),
        ({"system": f"{BLOCK['text']}\nrules"}, {"system": "rules"}),
        (
            {"messages": [{"role": "system", "content": [BLOCK, RULES]}, {"role": "user", "content": "hi"}]},
            {"messages": [{"role": "system", "content": [RULES]}, {"role": "user", "content": "hi"}]},
        ),
    ],
)
def test_the_changing_attribution_block_is_dropped(body: dict[str, Any], expected: dict[str, Any]) -> None:
    before = json.dumps(body)
    assert without_volatile(body, [ATTRIBUTION]) == expected
    assert json.dumps(body) == before
    assert without_volatile(body, []) is body


@pytest.mark.parametrize(
    "body",
    [
        {"system": [RULES, BLOCK]},
        {"messages": [{"role": "user", "content": [BLOCK]}]},
        {"messages": []},
        {"prompt": "x"},
        {},
    ],
)
def test_nothing_else_is_dropped(body: dict[str, Any]) -> None:
    assert without_volatile(body, [ATTRIBUTION]) is body
