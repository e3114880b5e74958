"""The rules of counts, branches and nodes, one at a time."""

import pytest
from directory_bench import B, Bench, chain, pack, stored

from schemas.branch import BranchEventType, BranchKind
from schemas.directory import BranchQuery
from schemas.kv import Tier
from schemas.phase import Phase, PhaseCommand
from services.directory.core.effects import NodeLost, ReferencesChanged
from services.router.core.prefix import shared_prefix


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_prefix_at_one_node_and_answer_at_another_hit_in_full_at_a_third(bench: Bench) -> None:
    """P1 prefilled five blocks, D1 wrote the three it decoded, and knows nothing of those before them."""
    bench.say("d1", 1, stored(B[5:], B[4]))
    bench.say("p1", 1, stored(B[:5]))
    bench.answered("a", B, "p1", "d1", prompt_blocks=5)
    reply = bench.match([*B, 99], branch="a")
    assert (reply.blocks, reply.branch_blocks, reply.lineage) == (8, 8, "extends")
    assert [(piece.first, piece.last, piece.nodes) for piece in reply.pieces] == [(0, 5, ["p1"]), (5, 8, ["d1"])]
    prefix = shared_prefix("p2", reply, 9, lambda _: True)
    assert prefix.blocks == prefix.fetched_blocks == 8


def test_a_silent_node_is_lost_and_comes_back_by_snapshot(bench: Bench) -> None:
    bench.say("p1", 1, stored(B))
    bench.answered("a", B)
    bench.tick(3.5)
    assert [effect.node for effect in bench.effects if isinstance(effect, NodeLost)] == ["p1"]
    assert bench.match(B).blocks == 0
    assert bench.match(B).known_blocks == 8, "keys are remembered"
    bench.say("p1", 1)
    assert bench.asked() == ["p1"]
    bench.snapshot("p1", 1, stored(B))
    assert bench.match(B).blocks == 8
    assert bench.counts("p1", B) == [1] * 8


def test_a_node_back_under_a_lower_incarnation_is_heard_once_its_former_life_is_silent(bench: Bench) -> None:
    other = chain("other")
    bench.say("p1", 1, stored(B), incarnation=1000)
    bench.say("p1", 1, stored(other), incarnation=500)
    assert bench.match(other).blocks == 0, "its former life may speak still"
    assert bench.core.counters.late_locations == 1
    for _ in range(4):
        bench.tick(1.0)
        bench.hello("p1", incarnation=500)
        bench.say("p1", 1, incarnation=500)
    assert [effect.node for effect in bench.effects if isinstance(effect, NodeLost)] == ["p1"]
    bench.snapshot("p1", 1, stored(other), incarnation=500)
    assert bench.match(other).blocks == 1
    assert bench.match(B).blocks == 0
    bench.say("p1", 2, stored(B), incarnation=500)
    assert bench.match(B).blocks == 8


def test_a_heartbeat_shows_what_was_lost(bench: Bench) -> None:
    bench.say("p1", 1, stored(B[:4]))
    bench.say("p1", 2)
    assert bench.asked() == ["p1"]


def test_a_failed_snapshot_is_asked_again_but_not_at_once(bench: Bench) -> None:
    bench.say("p1", 3)
    for _ in range(3):
        bench.core.on_snapshot_failed("p1", bench.now)
        asked = len(bench.asked())
        bench.tick(0.1)
        assert len(bench.asked()) == asked
        bench.say("p1", 3)
        for _ in range(5):
            bench.tick(1.0)
            bench.say("p1", 3)
        assert len(bench.asked()) == asked + 1
    bench.snapshot("p1", 3, stored(B))
    assert bench.match(B).blocks == 8


def test_decode_to_prefill_keeps_only_sole_copies_as_prefill_claims(bench: Bench) -> None:
    bench.say("p1", 1, stored(B[:6]))
    bench.say("d1", 1, stored(B, tier=Tier.L1), stored(B[6:], parent=B[5]))
    bench.answered("a", B, prefill="p1", decode="d1")
    assert bench.counts("p1", B) == [1] * 6 + [0, 0]
    assert bench.counts("d1", B) == [1] * 8
    bench.switch("d1", Phase.PREFILL, 1)
    assert bench.counts("d1", B) == [0] * 6 + [1, 1], "the answer lies nowhere else"
    bench.switch("d1", Phase.DECODE, 2)
    bench.switch("d1", Phase.PREFILL, 3)
    assert bench.counts("d1", B) == [0] * 6 + [1, 1], "they are prefill claims now"
    bench.say("p1", 2, stored(B[6:], parent=B[5]))
    assert bench.counts("p1", B) == [1] * 8
    assert bench.counts("d1", B) == [0] * 8, "at most one count per block and phase"
    bench.tell("a", BranchEventType.END)
    assert bench.counts("p1", B) == [0] * 8


def test_a_switch_of_a_late_epoch_changes_nothing(bench: Bench) -> None:
    bench.say("d1", 1, stored(B))
    bench.answered("a", B, prefill="p1", decode="d1")
    bench.switch("d1", Phase.DECODE, 5)
    bench.switch("d1", Phase.PREFILL, 4)
    assert bench.counts("d1", B) == [1] * 8
    bench.say("p2", 1, stored(B))
    bench.switch("d1", Phase.BOTH, 6)
    assert bench.counts("d1", B) == [1] * 8
    bench.switch("d1", Phase.PREFILL, 7)
    assert bench.counts("d1", B) == [0] * 8


def test_a_parent_that_ends_takes_its_descendants_unless_told_otherwise(bench: Bench) -> None:
    bench.say("p1", 1, stored(B))
    for branch, parent in (("root", None), ("child", "root"), ("grandchild", "child")):
        if parent is not None:
            bench.tell(branch, BranchEventType.SUBAGENT, parent=parent)
        bench.answered(branch, B)
    bench.tell("root", BranchEventType.END, cascade=False)
    assert bench.counts("p1", B) == [2] * 8
    bench.tell("child", BranchEventType.END)
    assert bench.counts("p1", B) == [0] * 8


def test_a_late_answer_of_an_ended_branch_changes_nothing_and_a_new_request_revives_it(bench: Bench) -> None:
    bench.say("p1", 1, stored(B))
    before = bench.match(B, request="before", branch="a")
    bench.answered("a", B[:4])
    bench.tell("a", BranchEventType.END)
    bench.answered("a", B, request="before", life=before.life, lineage=before.lineage)
    assert bench.counts("p1", B) == [0] * 8
    assert bench.core.counters.late_events == 1
    after = bench.match(B, request="after", branch="a")
    assert (after.lineage, after.life) == ("opens", 1)
    assert bench.counts("p1", B) == [0] * 8, "a match changes no count"
    bench.tell("a", BranchEventType.OPEN)
    assert bench.counts("p1", B) == [0] * 8, "no bus event revives a branch by itself"
    bench.answered("a", B, request="after", life=after.life, lineage=after.lineage)
    assert bench.counts("p1", B) == [1] * 8


def test_a_demoted_branch_is_revived_in_full_by_its_next_request(bench: Bench) -> None:
    bench.say("p1", 1, stored(B))
    bench.answered("a", B[:6])
    bench.tick(1800.0)
    bench.say("p1", 1)
    bench.snapshot("p1", 1, stored(B))
    assert bench.counts("p1", B) == [0] * 8
    reply = bench.match(B, branch="a")
    assert (reply.lineage, reply.branch_blocks) == ("extends", 0)
    bench.answered("a", B, version=reply.version, life=reply.life)
    assert bench.counts("p1", B) == [1] * 8


def test_a_keepalive_renews_the_lease(bench: Bench) -> None:
    bench.answered("a", B)
    bench.tick(1700.0)
    bench.tell("a", BranchEventType.KEEPALIVE)
    bench.tick(1700.0)
    assert bench.core.branches.active == 1


def test_side_requests_are_transient_until_one_is_extended(bench: Bench) -> None:
    title, longer = chain(*"title"), chain(*"title", "and", "more")
    bench.say("p1", 1, stored(B), stored(longer))
    bench.answered("a", B)
    reply = bench.match(title, branch="a")
    assert (reply.lineage, reply.version) == ("transient", 0)
    bench.answered("a", title, version=0)
    assert (bench.counts("p1", B), bench.counts("p1", title)) == ([1] * 8, [0] * 5)
    assert bench.match(chain(*"01234567", "8"), branch="a").lineage == "extends"
    reply = bench.match(longer, branch="a")
    assert (reply.lineage, reply.version) == ("compact", 1)
    bench.answered("a", longer, version=1)
    assert (bench.counts("p1", B), bench.counts("p1", longer)) == ([0] * 8, [1] * 7)


def test_the_last_two_blocks_of_a_prompt_may_be_rewritten(bench: Bench) -> None:
    bench.answered("a", B)
    assert bench.match(chain(*"012345", "x", "y"), branch="a").lineage == "extends"
    assert bench.match(chain(*"01234", "x", "y"), branch="a").lineage == "transient"


def test_an_explicit_signal_bumps_the_version_at_once(bench: Bench) -> None:
    bench.answered("a", B, version=3)
    bench.tell("a", BranchEventType.COMPACT)
    reply = bench.match(chain("new"), branch="a")
    assert (reply.lineage, reply.version) == ("compact", 4)
    bench.tell("a", BranchEventType.COMPACT, version=4)
    assert bench.match(chain("new"), branch="a").version == 4, "the version is reached already"
    assert bench.match(chain("new"), branch="a", version=9).version == 9
    assert bench.match(B, branch="a", version=2).lineage == "transient"


def test_a_subagent_counts_on_its_own_blocks_only(bench: Bench) -> None:
    own = chain("0", "1", "sub")
    bench.say("p1", 1, stored(B), stored(own[2:], parent=B[1]))
    bench.answered("root", B)
    reply = bench.match(own, branch="s", parent="root", kind=BranchKind.SUBAGENT)
    assert (reply.lineage, reply.parent) == ("subagent", "root")
    bench.answered("s", own, kind=BranchKind.SUBAGENT, parent="root")
    assert bench.counts("p1", B) == [2, 2, 1, 1, 1, 1, 1, 1]
    assert bench.counts("p1", own) == [2, 2, 1]


def test_requests_without_a_branch_are_told_apart_by_their_context(bench: Bench) -> None:
    first = bench.match(B[:4], request="q1")
    assert (first.branch, first.lineage, first.inferred) == ("i-q1", "opens", True)
    bench.answered("i-q1", B[:5], inferred=True, prompt_blocks=4)
    second = bench.match(B[:7], request="q2")
    assert (second.branch, second.lineage, second.branch_blocks) == ("i-q1", "extends", 5)
    bench.answered("i-q1", B, inferred=True, prompt_blocks=7)
    assert confidence(bench, "i-q1") == pytest.approx(2 / 3)
    left = chain(*"0123", "another", "way")
    third = bench.match(left, request="q3")
    assert (third.branch, third.lineage, third.parent) == ("i-q3", "fork", "i-q1")
    bench.answered("i-q3", left, inferred=True, parent="i-q1", kind=BranchKind.FORK)
    assert confidence(bench, "i-q3") == 0.5, "what it is to the one it left shows later"
    bench.tick(1000.0)
    bench.match(chain(*"0123", "another", "way", "on"), request="q4")
    bench.tick(900.0)
    heir = bench.core.branches.get(("", "i-q3"))
    assert heir is not None
    assert (heir.version, heir.kind) == (1, BranchKind.MAIN), "the old tip was not used again: it was a compaction"


def confidence(bench: Bench, branch: str) -> float:
    (found,) = bench.core.listed(BranchQuery(branch=branch), bench.now, 0.0)
    return found.confidence


def test_branches_of_tenants_are_apart_and_only_routers_report_contexts(bench: Bench) -> None:
    bench.say("p1", 1, stored(B))
    bench.answered("a", B, tenant="t1")
    bench.tell("a", BranchEventType.END, source="somebody")
    assert bench.counts("p1", B) == [1] * 8, "the same id of the default tenant is another branch"
    bench.answered("b", B, source="somebody")
    assert bench.core.counters.foreign_events == 1
    bench.tell("a", BranchEventType.END, tenant="t1", source="somebody")
    assert bench.counts("p1", B) == [0] * 8


def test_a_context_without_keys_is_found_by_its_tip_and_else_counted(bench: Bench) -> None:
    bench.say("p1", 1, stored(B))
    bench.answered("a", B, packed=b"", base_blocks=8, base=B[7])
    assert bench.counts("p1", B) == [1] * 8
    other = chain(*"unknown")
    bench.answered("b", other, packed=b"")
    bench.answered("c", other, packed=pack(other[2:]), base_blocks=3)
    assert bench.core.counters.unresolved_contexts == 2


def test_blind_answers_say_so_and_pools_are_told_when_it_sees() -> None:
    bench = Bench()
    bench.core.blind = True
    bench.say("p1", 1, stored(B))
    bench.answered("a", B, prefill="p1", decode="p1")
    bench.switch("p1", Phase.PREFILL, 1)
    assert bench.match(B).blind
    assert not any(isinstance(effect, ReferencesChanged) for effect in bench.effects)
    assert bench.counts("p1", B) == [2] * 8, "a command waits until all copies are known"
    bench.done(bench.core.see())
    assert bench.counts("p1", B) == [1] * 8
    told = [effect for effect in bench.effects if isinstance(effect, ReferencesChanged)]
    assert any(effect.full for effect in told)
    assert bench.bits("p1") == dict.fromkeys(B, (True, False))
    assert not bench.match(B).blind


def test_work_that_was_put_off_does_not_reach_what_came_after_it(bench: Bench) -> None:
    bench.say("d1", 1, stored(B))
    bench.say("p1", 1, stored(B))
    for number in range(4):
        bench.answered(f"b{number}", B, prefill="p1", decode="d1")
    assert bench.counts("d1", B) == [4] * 8
    command = PhaseCommand(id="c", t=0.0, node="d1", phase=Phase.PREFILL, epoch=1, reason="", decision_id="")
    bench.core.on_phase(command)
    bench.core.work(1)
    bench.answered("b2", B, prefill="p1", decode="d1", settled=False)
    assert bench.core.has_work
    bench.core.check()
    bench.done([])
    assert bench.counts("d1", B) == [1] * 8, "the request that decoded there to its end counts, the others do not"


def test_a_lost_node_is_out_of_sight_before_it_is_swept(bench: Bench) -> None:
    for number in range(20):
        bench.say("p1", number + 1, stored(chain(f"first {number}", "second")))
    bench.now += 5.0
    bench.core.tick(bench.now)
    assert bench.core.has_work
    assert bench.match(chain("first 3", "second")).blocks == 0
    bench.core.work(3)
    bench.core.check()
    bench.say("p1", 1, stored(chain("first 3")), incarnation=2)
    assert bench.match(chain("first 3", "second")).blocks == 1
    assert bench.held("p1") == 1
