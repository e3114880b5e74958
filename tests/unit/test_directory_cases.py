"""Faults that were reported of other systems, as cases of the directory's core."""

import pytest
from directory_bench import B, Bench, chain, hello, removed, stored

from schemas.branch import BranchEventType
from schemas.directory import MatchQuery
from schemas.kv import ChangeType, KvLocation, LocationChange, Tier
from schemas.phase import Phase
from services.directory.core.effects import NodeRefused


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_case_17_head_missing_tail_kept(bench: Bench) -> None:
    bench.say("p1", 1, stored(B))
    bench.say("p1", 2, removed([B[1]]))
    assert bench.match(B).blocks == 1
    assert bench.core.locations.nodes["p1"].holdings[Tier.L2].unreachable == 6
    assert [key for key, (_, unreachable) in bench.bits("p1").items() if unreachable] == B[2:]
    bench.say("p1", 3, stored([B[1]], parent=B[0]))
    assert bench.match(B).blocks == 8
    assert not any(unreachable for _, unreachable in bench.bits("p1").values())


def test_case_31_one_repair_after_a_gap(bench: Bench) -> None:
    for seq in (1, 2):
        bench.say("p1", seq, stored([B[seq - 1]], parent=B[seq - 2] if seq > 1 else None))
    bench.say("p1", 5, stored([B[4]], parent=B[3]))
    assert bench.asked() == ["p1"]
    bench.snapshot("p1", 6, stored(B[:6]))
    bench.say("p1", 6, stored([B[5]], parent=B[4]))
    bench.say("p1", 7, stored([B[6]], parent=B[5]))
    assert bench.asked() == ["p1"]
    assert bench.core.counters.duplicate_locations == 1
    assert bench.core.locations.nodes["p1"].feed.seq == 7
    assert bench.match(B).blocks == 7


def test_case_33_restarted_publisher(bench: Bench) -> None:
    long = chain(*"abcdefghijkl")
    for seq in range(1, 481):
        bench.core.on_location(KvLocation(node="p1", incarnation=1, seq=seq, changes=[stored(long)]), 0.0)
    bench.answered("a", long)
    assert bench.counts("p1", long) == [1] * 12
    bench.say("p1", 1, stored(B[:2]), incarnation=2)
    assert bench.held("p1") == 2
    bench.say("p1", 481, stored(long), incarnation=1)
    assert bench.held("p1") == 2
    assert bench.core.counters.late_locations == 1
    assert bench.counts("p1", long) == [0] * 12
    assert bench.core.stats().claims == 12, "the branch keeps its claims"
    bench.say("p1", 2, stored(long), incarnation=2)
    assert bench.counts("p1", long) == [1] * 12, "a copy made again is counted again"
    assert bench.asked() == []


def test_case_35_unknown_parent_is_repaired_and_nothing_dropped(bench: Bench) -> None:
    b1, b2 = chain("1"), chain("2")
    b3 = chain("1", "3")
    b4 = chain("1", "3", "4")
    bench.say("p1", 1, stored(b3[1:], parent=b1[0]))
    bench.say("p1", 2, stored(b4[2:], parent=b3[1]))
    assert bench.core.counters.unknown_parents >= 1
    bench.tick(1.0)
    bench.tick(1.0)
    assert bench.asked() == ["p1"]
    bench.snapshot("p1", 2, stored(b1), stored(b2), stored(b4[1:], parent=b1[0]))
    assert bench.held("p1") == 4
    assert bench.match(b4).blocks == 3
    assert bench.match(b2).blocks == 1
    for _ in range(3):
        bench.tick(1.0)
        bench.say("p1", 2)
    assert bench.asked() == ["p1"]


def test_case_35_an_orphan_that_stays_one_asks_once(bench: Bench) -> None:
    bench.say("d1", 1, stored(B[5:], parent=B[4]))
    bench.tick(1.0)
    bench.snapshot("d1", 1, stored(B[5:], parent=B[4]))
    for _ in range(20):
        bench.tick(1.0)
        bench.say("d1", 1)
    assert bench.asked() == ["d1"]
    bench.say("p1", 1, stored(B[:5]))
    assert bench.match(B).blocks == 8, "the pieces of both nodes join"


@pytest.mark.parametrize("how", ["cleared", "restarted", "heartbeat"])
def test_case_37_a_cleared_node_attracts_nothing(bench: Bench, how: str) -> None:
    ten = chain(*"0123456789")
    bench.say("p1", 1, stored(ten))
    bench.say("p2", 1, stored(ten[:4]))
    bench.answered("a", ten)
    if how == "cleared":
        bench.say("p1", 2, LocationChange(type=ChangeType.CLEARED, tier=Tier.L2))
    elif how == "heartbeat":
        bench.beat("p1", 1, [])
    else:
        bench.say("p1", 0, incarnation=2)
    assert bench.held("p1") == 0
    reply = bench.match(ten)
    assert reply.blocks == 4
    assert [(match.node, match.l2_blocks) for match in reply.nodes] == [("p2", 4)]
    assert bench.core.stats().claims == 10


def test_case_37_a_node_that_holds_something_else_is_repaired_by_one_snapshot() -> None:
    bench = Bench(node_timeout_s=100.0)
    bench.say("p1", 1, stored(B))
    bench.beat("p1", 1, B)
    assert bench.asked() == []
    bench.beat("p1", 1, [*B[:7], B[0] ^ 1])
    assert bench.asked() == ["p1"], "as many blocks, but others"
    bench.snapshot("p1", 1, stored(B[:7]))
    bench.beat("p1", 1, B[:7])
    assert bench.held("p1") == 7
    bench.beat("p1", 1, B[:6])
    assert bench.asked() == ["p1"], "not again at once"
    bench.tick(61.0)
    bench.beat("p1", 1, B[:6])
    assert bench.asked() == ["p1", "p1"]
    assert bench.core.counters.drifted_nodes == 3


def test_case_51_redelivered_lifecycle_events_count_once(bench: Bench) -> None:
    bench.say("p1", 1, stored(B[:4]))
    bench.answered("r", B[:4])
    counts = [bench.counts("p1", B[:4])]
    fork = bench.tell("f", BranchEventType.FORK, parent="r")
    counts.append(bench.counts("p1", B[:4]))
    bench.done(bench.core.on_branch_event(fork, bench.now))
    counts.append(bench.counts("p1", B[:4]))
    end = bench.tell("f", BranchEventType.END)
    counts.append(bench.counts("p1", B[:4]))
    bench.done(bench.core.on_branch_event(end, bench.now))
    counts.append(bench.counts("p1", B[:4]))
    assert counts == [[n] * 4 for n in (1, 2, 2, 1, 1)]
    assert bench.core.counters.duplicate_events == 2


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("block_size", 32, "block_size of p2 is 32, of this cluster 16"),
        ("key_version", "k2", "key_version of p2 is 'k2', of this cluster 'k1'"),
        ("model", "other", "model of p2 is 'other', of this cluster 'm'"),
    ],
)
def test_case_63_a_node_with_other_blocks_is_refused_with_both_values(
    bench: Bench, field: str, value: object, text: str
) -> None:
    bench.done(bench.core.on_hello(hello("p1"), 0.0))
    bench.say("p2", 1, stored(B))
    bench.done(bench.core.on_hello(hello("p2", **{field: value}), 0.0))
    assert [effect.text for effect in bench.effects if isinstance(effect, NodeRefused)] == [text]
    assert bench.match(B).blocks == 0
    bench.say("p2", 2, stored(B))
    assert bench.held("p2") == 0
    assert bench.core.counters.refused_locations == 1
    bench.done(bench.core.on_hello(hello("p2"), 0.0))
    assert bench.asked() == ["p1", "p2"], "a node that came to reason is asked what it holds"
    bench.snapshot("p2", 3, stored(B))
    assert bench.match(B).blocks == 8


def test_case_69_siblings_are_told_who_computes_their_prefix(bench: Bench) -> None:
    common, tails = chain(*"c" * 64), [chain(*"c" * 64, f"t{i}") for i in range(4)]
    first = bench.match(tails[0], request="r0")
    assert (first.pending_blocks, first.pending_request) == (0, None)
    bench.core.match(MatchQuery(request="r0", placed_node="p1"), bench.now)
    for number in (1, 2, 3):
        bench.now += 0.01
        reply = bench.match(tails[number], request=f"r{number}")
        assert (reply.pending_blocks, reply.pending_node, reply.pending_request) == (64, "p1", "r0")
        assert reply.known_blocks == 0, "what is only announced was not produced yet"
    bench.say("p1", 1, stored(common[:40]))
    assert bench.match(tails[3], request="r3").pending_blocks == 64
    bench.core.match(MatchQuery(request="r0", release=True), bench.now)
    assert bench.match(tails[3], request="r4").pending_request == "r1", "the next in line is named"
    bench.tick(601.0)
    assert len(bench.core.pending) == 0
    bench.core.check()


def test_case_77_a_switched_node_offers_what_it_held(bench: Bench) -> None:
    a = chain("a", "b")
    c = chain("c")
    bench.say("p1", 1, stored(a), stored(c))
    bench.answered("x", a)
    bench.switch("p1", Phase.DECODE, 1)
    assert bench.counts("p1", a + c) == [1, 1, 0]
    reply = bench.match(chain("a", "b", "new"), branch="x")
    assert reply.blocks == 2
    assert [(piece.first, piece.last, piece.nodes) for piece in reply.pieces] == [(0, 2, ["p1"])]


def test_case_89_counts_of_many_branches_on_few_blocks(bench: Bench) -> None:
    """What the pool needs to evict in order: count-0 blocks known as such, however many branches claim the rest."""
    contexts = [chain(f"branch {n}", *(f"{i}" for i in range(29))) for n in range(5)]
    free = chain("free", "blocks")
    bench.say("p1", 1, *(stored(keys) for keys in [*contexts, free]))
    for number, keys in enumerate(contexts):
        bench.answered(f"b{number}", keys)
    assert {key for key, (referenced, _) in bench.bits("p1").items() if not referenced} == set(free)
    holding = bench.core.locations.nodes["p1"].holdings[Tier.L2]
    assert (holding.blocks, holding.referenced) == (152, 150)
    bench.tick(1.0)
    bench.core.locations.nodes["p1"].heard = bench.now
    assert bench.match(free).referenced_share == {"p1": 150 / 152}


def test_case_91_compaction_frees_the_old_tail(bench: Bench) -> None:
    v1, v2 = chain(*"012345"), chain("0", "s1", "s2")
    bench.say("p1", 1, stored(v1))
    bench.answered("a", v1, version=1)
    bench.say("p1", 2, stored(v2[1:], parent=v2[0]))
    bench.answered("a", v2, version=2)
    assert bench.counts("p1", v1) == [1, 0, 0, 0, 0, 0]
    assert bench.counts("p1", v2) == [1, 1, 1]
    bits = bench.bits("p1")
    assert [bits[key][0] for key in v1] == [True] + [False] * 5
    assert [bits[key][0] for key in v2] == [True] * 3
    bench.answered("a", v1, version=1)
    assert bench.counts("p1", v2) == [1, 1, 1], "an answer of the old version changes nothing"


def test_case_93_leases_follow_the_clock_of_the_receiver(bench: Bench) -> None:
    bench.say("p1", 1, stored(B))
    for branch, sent in (("behind", -600.0), ("right", 0.0), ("ahead", 600.0)):
        bench.answered(branch, B, t=sent)
    bench.tick(1799.0)
    assert bench.core.branches.active == 3
    bench.tick(1.0)
    assert bench.core.branches.active == 0
    assert bench.core.stats().claims == 0
