"""What a request is to its branch: side requests, compactions without numbers, families."""

import pytest
from directory_bench import B, Bench, chain, stored

from schemas.branch import BranchEventType, BranchKind, Compaction

SIDE = BranchKind.TRANSIENT
TITLE = chain(*"title")
SHORT, LONGER = chain(*"01xy"), chain(*"01xyz!")
SUMMARY = chain(*"01234567", "summarise")


@pytest.fixture
def bench() -> Bench:
    return Bench()


def ask(bench: Bench, branch: str | None, keys: list[int], **said: object) -> tuple[str, int | None]:
    """A request from its match to its answer."""
    request = f"r{bench.events}"
    reply = bench.match(keys, branch=branch, request=request, **said)
    bench.answered(
        reply.branch or "",
        keys,
        request=request,
        version=reply.version,
        life=reply.life,
        lineage=reply.lineage,
        inferred=reply.inferred,
        **said | {"parent": reply.parent},
    )
    return reply.lineage, reply.version


def branch(bench: Bench, name: str) -> tuple[int, BranchKind, int]:
    found = bench.core.branches.get(("", name))
    assert found is not None
    return found.version, found.kind, found.blocks


def test_a_title_request_that_comes_first_is_not_the_branch_and_no_compaction_follows(bench: Bench) -> None:
    assert ask(bench, "s", TITLE) == ("opens", 0)
    assert ask(bench, "s", B) == ("transient", 0)
    assert ask(bench, "s", [*B, *chain(*"01234567", "9")[8:]]) == ("opens", 0)
    assert branch(bench, "s") == (0, BranchKind.MAIN, 9)


def test_a_title_request_that_is_known_as_one_never_counts(bench: Bench) -> None:
    assert ask(bench, "s", TITLE, kind=SIDE) == ("transient", 0)
    assert branch(bench, "s") == (0, BranchKind.MAIN, 0)
    assert ask(bench, "s", B) == ("opens", 0)
    assert ask(bench, "s", TITLE, kind=SIDE) == ("transient", 0)
    assert ask(bench, "s", B, kind=SIDE) == ("transient", 0), "even if it contains the branch's context"
    assert branch(bench, "s") == (0, BranchKind.MAIN, 8)


def test_a_side_request_that_is_extended_becomes_the_context(bench: Bench) -> None:
    ask(bench, "s", SHORT, kind=SIDE)
    assert ask(bench, "s", LONGER) == ("opens", 0)


def test_the_request_after_a_summary_is_the_compacted_context(bench: Bench) -> None:
    ask(bench, "s", B)
    assert ask(bench, "s", SUMMARY, kind=SIDE, compaction=Compaction.SUMMARY) == ("transient", 0)
    assert ask(bench, "s", TITLE, kind=SIDE) == ("transient", 0), "a side request between does not use it up"
    assert ask(bench, "s", SHORT) == ("compact", 1)
    assert ask(bench, "s", LONGER) == ("extends", 1)
    assert branch(bench, "s") == (1, BranchKind.MAIN, 6)


def test_a_summary_that_is_not_used_is_no_compaction(bench: Bench) -> None:
    ask(bench, "s", B)
    ask(bench, "s", SUMMARY, kind=SIDE, compaction=Compaction.SUMMARY)
    assert ask(bench, "s", [*B, *chain(*"01234567", "9")[8:]]) == ("extends", 0)
    assert ask(bench, "s", TITLE) == ("transient", 0)


@pytest.mark.parametrize("hook", [False, True])
def test_a_compaction_is_counted_once_whoever_says_it(bench: Bench, hook: bool) -> None:
    ask(bench, "s", B)
    ask(bench, "s", SUMMARY, kind=SIDE, compaction=Compaction.SUMMARY)
    if hook:
        bench.tell("s", BranchEventType.COMPACT)
    assert ask(bench, "s", SHORT, compaction=Compaction.DONE) == ("compact", 1)
    assert ask(bench, "s", LONGER) == ("extends", 1)
    assert branch(bench, "s")[0] == 1


def test_a_session_that_ended_and_is_resumed_to_be_compacted(bench: Bench) -> None:
    ask(bench, "s", B)
    bench.tell("s", BranchEventType.END)
    assert ask(bench, "s", SUMMARY, kind=SIDE, compaction=Compaction.SUMMARY) == ("transient", 0)
    bench.tell("s", BranchEventType.COMPACT)
    bench.tell("s", BranchEventType.END)
    assert ask(bench, "s", SHORT) == ("opens", 1)


def test_a_compaction_said_in_an_answer_placed_blind_counts_once(bench: Bench) -> None:
    ask(bench, "s", B)
    bench.answered("s", SHORT, version=0, compaction=Compaction.DONE)
    assert branch(bench, "s")[0] == 1


def test_without_any_word_a_compaction_shows_at_the_second_request(bench: Bench) -> None:
    ask(bench, "s", B)
    ask(bench, "s", chain(*"01234567", "9"))
    ask(bench, "s", SUMMARY)
    assert ask(bench, "s", SHORT) == ("transient", 0)
    assert ask(bench, "s", LONGER) == ("compact", 1)


def test_branches_of_a_family_are_told_apart_by_their_contexts(bench: Bench) -> None:
    assert ask(bench, None, B, family="f") == ("opens", 0)
    assert ask(bench, None, TITLE, family="f") == ("opens", 0)
    assert ask(bench, None, B, family="g") == ("opens", 0), "the same context in another family is another branch"
    assert ask(bench, None, [*B, *chain(*"01234567", "9")[8:]], family="f") == ("extends", 0)
    names = [found.key[1] for found in bench.core.branches.newest_first()]
    assert sorted(name.split("/")[0] for name in names) == ["f", "f", "g"]
    bench.tell("f", BranchEventType.END)
    assert bench.core.branches.active == 1, "the end of a family ends all its branches"


def test_a_parents_child_is_what_its_first_context_says(bench: Bench) -> None:
    ask(bench, "main", B)
    assert ask(bench, "fork", [*B, *chain(*"01234567", "9")[8:]], parent="main") == ("fork", 0)
    assert ask(bench, "sub", TITLE, parent="main") == ("subagent", 0)
    assert [branch(bench, name)[1] for name in ("fork", "sub")] == [BranchKind.FORK, BranchKind.SUBAGENT]


SYSTEM = "0123"
AGENT = chain(*SYSTEM, *"abcdefgh")
COMPACTED = chain(*SYSTEM, *"ABCD")


def kinds(bench: Bench) -> list[tuple[BranchKind, int, bool]]:
    """(kind, version, has a parent) of every branch, oldest first."""
    found = reversed(list(bench.core.branches.newest_first()))
    return [(branch.kind, branch.version, branch.parent is not None) for branch in found]


def after_the_lease(bench: Bench) -> None:
    for _ in range(2):
        bench.tick(1000.0)
        bench.say("p1", 1000 + bench.events)


MAIN, FORK = BranchKind.MAIN, BranchKind.FORK


def test_a_context_that_nobody_comes_back_to_was_compacted(bench: Bench) -> None:
    ask(bench, None, AGENT)
    assert ask(bench, None, COMPACTED) == ("fork", 0)
    assert kinds(bench) == [(MAIN, 0, False), (FORK, 0, True)]
    bench.tick(1000.0)
    bench.say("p1", 1000)
    assert ask(bench, None, chain(*SYSTEM, *"ABCDEF")) == ("extends", 0)
    assert ask(bench, None, chain(*SYSTEM, *"XY")) == ("fork", 0), "the compacted one stands for the one it left"
    after_the_lease(bench)
    assert sorted(kinds(bench)) == [(MAIN, 0, False), (MAIN, 1, True), (MAIN, 2, True)]


def test_a_context_that_is_used_again_was_forked(bench: Bench) -> None:
    ask(bench, None, chain(*SYSTEM, "a"))
    ask(bench, None, AGENT)
    ask(bench, None, chain(*SYSTEM, *"abcd", *"ZZZ"))
    assert ask(bench, None, chain(*SYSTEM, *"abcdefghij")) == ("extends", 0)
    after_the_lease(bench)
    assert sorted(kinds(bench)) == [(FORK, 0, True), (MAIN, 0, False)]


def test_a_branch_taken_for_compacted_claims_in_full_when_it_is_used_again(bench: Bench) -> None:
    bench.say("p1", 1, stored(AGENT))
    ask(bench, None, chain(*SYSTEM[:2], *"other agent"))
    ask(bench, None, chain(*SYSTEM, *"abc"))
    ask(bench, None, AGENT)
    ask(bench, None, COMPACTED)
    assert bench.counts("p1", AGENT) == [3] * 2 + [2] * 2 + [1] * 8
    ask(bench, None, chain(*SYSTEM, *"ABCDEF"))
    assert bench.counts("p1", AGENT) == [2] * 2 + [1] * 2 + [0] * 8
    assert ask(bench, None, chain(*SYSTEM, *"abcdefghij")) == ("extends", 0)
    assert bench.counts("p1", AGENT) == [3] * 2 + [2] * 2 + [1] * 8
    assert sorted(kinds(bench)) == [(MAIN, 0, False)] * 3


@pytest.mark.parametrize(
    "why", ["nobody else begins alike", "no more than a beginning", "it is used meanwhile", "it is no shorter"]
)
def test_a_branch_is_not_taken_for_compacted_on_less(bench: Bench, why: str) -> None:
    bench.say("p1", 1, stored(AGENT))
    if why != "nobody else begins alike":
        ask(bench, None, chain(*SYSTEM[:2], *"other agent"))
    if why != "no more than a beginning":
        ask(bench, None, chain(*SYSTEM, *"abc"))
    ask(bench, None, AGENT)
    anew = chain(*SYSTEM, *"ABCDEFGH") if why == "it is no shorter" else COMPACTED
    ask(bench, None, anew)
    if why == "it is used meanwhile":
        bench.tick(1.0)
        bench.match(chain(*SYSTEM, *"abcdefghij"), request="under way")
    ask(bench, None, chain(*SYSTEM, *"ABCDEFGHIJ"[: len(anew) - len(SYSTEM) + 2]))
    assert bench.counts("p1", AGENT)[4:] == [1] * 8


def test_an_agent_that_only_begins_alike_is_another_agent(bench: Bench) -> None:
    ask(bench, None, AGENT)
    assert ask(bench, None, chain(*SYSTEM, *"XYZ")) == ("fork", 0)
    assert ask(bench, None, chain(*SYSTEM, *"abcdefghij")) == ("extends", 0)
    assert kinds(bench) == [(MAIN, 0, False)] * 2
    assert ask(bench, None, chain(*SYSTEM, *"PQR")) == ("opens", 0), "two live branches begin like this one"


def test_siblings_that_begin_alike_are_told_apart_by_the_whole_of_their_prompts(bench: Bench) -> None:
    first, second = chain(*SYSTEM, *"ax"), chain(*SYSTEM, *"ay")
    ask(bench, None, first)
    assert ask(bench, None, second)[0] != "extends"
    names = [branch.key[1] for branch in reversed(list(bench.core.branches.newest_first()))]
    for keys, name in ((chain(*SYSTEM, *"axbc"), names[0]), (chain(*SYSTEM, *"aybc"), names[1])):
        assert bench.match(keys, request=f"m{name}").branch == name


def test_a_branch_that_waits_for_an_answer_is_extended_by_no_other_request(bench: Bench) -> None:
    ask(bench, None, AGENT)
    longer = [*AGENT, *chain(*SYSTEM, *"abcdefgh", "i")[12:]]
    assert bench.match(longer, request="one").lineage == "extends"
    assert bench.match(longer, request="one").lineage == "extends", "the same request asked again"
    assert bench.match(longer, request="two").lineage == "fork"
    bench.match([], request="one", release=True)
    assert bench.match(longer, request="three").lineage == "extends"
