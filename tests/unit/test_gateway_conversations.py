"""Branches seen message by message: the same judgement as the directory's, and prefix stability."""

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from schemas.branch import BranchEventType, BranchKind, Compaction
from services.router.core.identity import Identity, identify
from services.router.gateway.conversations import KEEPALIVE_S, Conversations, Said
from services.router.gateway.parts import parts_of

OPEN, COMPACT, END = BranchEventType.OPEN, BranchEventType.COMPACT, BranchEventType.END
SIDE = BranchKind.TRANSIENT
FIRST = ["tools", "system", "hello"]
SECOND = [*FIRST, "answer", "go on"]
SHORT = ["tools", "system", "summary"]
LONGER = [*SHORT, "answer", "more"]


class Bench:
    """Requests one after another; `said` collects the events."""

    def __init__(self) -> None:
        self.core = Conversations()
        self.said: list[Said] = []
        self.now = 0.0

    def ask(self, parts: list[str], branch: str | None = "b", **fields: object) -> str:
        self.now += 1.0
        found = self.core.observe(Identity("", branch, **fields), parts, self.now)  # type: ignore[arg-type]  # any field
        self.core.check()
        self.said += found.events
        return found.lineage


def test_a_branch_that_grows_is_stable() -> None:
    bench = Bench()
    assert [bench.ask(FIRST), bench.ask(SECOND), bench.ask([*SECOND, "x"])] == ["opens", "extends", "extends"]
    assert bench.said == [Said("b", OPEN)]
    (found,) = bench.core.listed()
    assert (found.stability, found.version, found.requests) == (1.0, 0, 3)


def test_a_rewritten_context_without_a_word_is_one_compaction_at_its_second_request() -> None:
    bench = Bench()
    lineages = [bench.ask(parts) for parts in (FIRST, SECOND, ["title?"], SHORT, LONGER, [*LONGER, "x"])]
    assert lineages == ["opens", "extends", "transient", "transient", "compact", "extends"]
    assert bench.said == [Said("b", OPEN), Said("b", COMPACT, None, 1)]
    assert bench.core.listed()[0].side_requests == 2
    assert (bench.core.listed()[0].stability or 1.0) < 1.0


def test_a_title_request_that_comes_first_is_no_context() -> None:
    bench = Bench()
    assert [bench.ask(["title?"]), bench.ask(FIRST), bench.ask(SECOND)] == ["opens", "transient", "opens"]
    assert bench.said == [Said("b", OPEN)]


def test_signals_count_once() -> None:
    bench = Bench()
    bench.ask(FIRST)
    bench.ask([*FIRST, "summarise"], kind=SIDE, compaction=Compaction.SUMMARY)
    assert bench.ask(SHORT, compaction=Compaction.DONE) == "compact"
    assert bench.ask(LONGER) == "extends"
    bench.ask(["new"], version=5)
    bench.ask(["late"], version=4)
    bench.ask(["new", "and last"], version=5, end=True)
    assert bench.said[1:] == [Said("b", COMPACT, None, 1), Said("b", COMPACT, None, 5), Said("b", END)]


def test_children_are_what_their_first_context_says() -> None:
    bench = Bench()
    bench.ask(SECOND, "a")
    bench.ask([*SECOND, "x"], "fork", parent="a")
    bench.ask(SHORT, "sub", parent="a")
    assert [said.type.value for said in bench.said] == ["open", "fork", "subagent"]


def test_without_ids_branches_are_told_apart_by_their_messages() -> None:
    bench = Bench()
    other = ["tools", "system", "another task"]
    for parts in (FIRST, other, SECOND, [*other, "answer", "more"], [*SECOND, "x"]):
        bench.ask(parts, None)
    assert [found.requests for found in bench.core.listed()] == [3, 2]
    assert all(found.inferred for found in bench.core.listed())


def test_a_branch_in_use_is_kept_alive() -> None:
    bench = Bench()
    bench.ask(FIRST)
    bench.now += KEEPALIVE_S
    bench.ask(SECOND)
    assert [said.type for said in bench.said] == [OPEN, BranchEventType.KEEPALIVE]


def test_recorded_harnesses_give_the_tree_they_have() -> None:
    fixtures = Path(__file__).parents[1] / "fixtures" / "harness"
    expected = {"claude_code_gateway_hints": [0, 0, 0], "codex": [1], "opencode": [0, 0]}
    for name, versions in expected.items():
        core = Conversations()
        for turn, line in enumerate((fixtures / f"{name}.jsonl").read_text().splitlines()):
            call = json.loads(line)
            headers = {key.lower(): value for key, value in call["headers"].items()}
            identity = identify("", headers, {key: call.get(key, [{}]) for key in call["body_keys"]})
            core.observe(identity, ["system", f"turn {turn}"], float(turn))
        found = [conversation.version for conversation in core.listed()]
        assert len(found) == len(versions)
        assert name != "codex" or found == versions


def test_marks_that_move_are_not_part_of_the_prompt() -> None:
    marked = {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]}
    plain = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
    assert parts_of({"messages": [marked]}) == parts_of({"messages": [plain]})
    assert parts_of({"messages": [marked]}) == parts_of({"messages": [{"role": "user", "content": "hi"}]})
    two = {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "text", "text": "ho"}]}
    assert parts_of({"messages": [two]}) != parts_of({"messages": [marked]})
    body = {"tools": [1], "system": "s", "input": ["a", "b"]}
    assert len(parts_of(body)) == 4
    assert parts_of({"prompt": "text"}) == ['"text"']
    assert parts_of({"model": "m"}) == []


names = st.sampled_from(["a", "b", None])
prompts = st.lists(st.sampled_from("xyz"), max_size=6)
kinds = st.sampled_from([None, SIDE, BranchKind.FORK, BranchKind.SUBAGENT])
signals = st.sampled_from([None, *Compaction])


@given(
    st.lists(st.tuples(names, prompts, kinds, signals, st.sampled_from([None, 0, 1, 2]), st.booleans()), max_size=30)
)
def test_any_order_of_requests_leaves_a_sound_state(calls: list[tuple[object, ...]]) -> None:
    core = Conversations(capacity=2)
    versions: dict[str, int] = {}
    for turn, (name, parts, kind, said, version, end) in enumerate(calls):
        identity = Identity("", name, "p", version, kind, end, family="f", compaction=said)  # type: ignore[arg-type]  # drawn
        found = core.observe(identity, parts, float(turn))  # type: ignore[arg-type]  # drawn
        core.check()
        for event in found.events:
            if event.type is COMPACT:
                assert event.version is not None
                assert event.version > versions.get(event.branch, -1) or event.branch not in versions
        versions[found.conversation.branch] = found.conversation.version
