"""A checkpoint that is taken in pieces says what is so when its last piece is taken, whatever happened meanwhile."""

from collections.abc import Callable

import pytest
from directory_bench import B, Bench, chain, pack, stored

from schemas.branch import BranchEventType
from schemas.directory import MatchQuery
from schemas.kv import BlockMedia, ChangeType, KvLocation, LocationChange, Tier
from schemas.phase import Phase
from services.directory.core.checkpoint import Part, SavedBranch, Saving
from services.directory.core.directory import Directory
from tests.directory_checkpoint import put_back, rest_of, taken, through_disk

SOLE = chain(*"sole copy")
TAKEN = chain(*"taken")
AGENT, COMPACTED = chain(*"0123abcdefgh"), chain(*"0123ABCD")
Change = Callable[[Bench], None]


def inferred(bench: Bench, keys: list[int]) -> None:
    """One request without a branch, from the question to its answer."""
    number = f"i{bench.events}"
    reply = bench.match(keys, request=number)
    assert reply.branch is not None
    said = {"lineage": reply.lineage, "version": reply.version, "parent": reply.parent, "inferred": reply.inferred}
    bench.answered(reply.branch, keys, request=number, life=reply.life, **said)


@pytest.fixture
def bench() -> Bench:
    """One branch whose only copy lies where it decodes, a parent and its child, one that was left by another."""
    bench = Bench(branch_lease_s=100.0, remember_blocks=30)
    bench.say("p1", 1, stored(B))
    bench.say("d1", 1, stored(SOLE))
    inferred(bench, chain(*"01other"))
    inferred(bench, chain(*"0123abc"))
    inferred(bench, AGENT)
    inferred(bench, COMPACTED)
    bench.answered("alone", SOLE, decode="d1")
    bench.say("d2", 1, stored(TAKEN))
    bench.answered("taken", TAKEN, decode="d2")
    bench.switch("d2", Phase.PREFILL, 1)
    bench.answered("parent", B)
    bench.tell("child", BranchEventType.FORK, parent="parent")
    bench.tell("silent", BranchEventType.OPEN)
    return bench


def switched(bench: Bench) -> None:
    bench.switch("d1", Phase.PREFILL, 1)
    assert bench.counts("d1", SOLE) == [1] * len(SOLE)


def came_home(bench: Bench) -> None:
    """A claim kept on d2 for want of a copy on p1."""
    bench.say("p1", 2, stored(TAKEN[:2]))
    assert bench.counts("d2", TAKEN) == [0, 0, 1, 1, 1]


def left_too(bench: Bench) -> None:
    inferred(bench, chain(*"01othXY"))


def settled_by_the_heir(bench: Bench) -> None:
    bench.now += 101.0
    inferred(bench, chain(*"0123ABCDEF"))


def looked_compacted(bench: Bench) -> None:
    inferred(bench, chain(*"0123ABCDEF"))


def used_again(bench: Bench) -> None:
    inferred(bench, chain(*"0123abcdefghij"))


def demoted(bench: Bench) -> None:
    bench.tick(60.0)
    bench.match([*B, 1], branch="parent")
    bench.tick(60.0)


def shown(bench: Bench) -> None:
    marks = [BlockMedia(1, b"c" * 32)]
    keys = chain(*"seen")
    bench.say("p1", 2, LocationChange(type=ChangeType.STORED, tier=Tier.L2, hashes=pack(keys), media=marks))


def orphaned(bench: Bench) -> None:
    bench.say("p1", 2, stored(chain(*"orphan")[3:], parent=chain(*"orphan")[2]))
    bench.say("p1", 3, stored(chain(*"orphan")[:3]))


def forgotten_and_known_again(bench: Bench) -> None:
    keys = chain(*(str(i) for i in range(40)))
    bench.answered("long", keys)
    bench.tell("long", BranchEventType.END)
    bench.answered("again", keys[:20])


CHANGES: list[Change] = [
    lambda bench: None,
    lambda bench: bench.tell("parent", BranchEventType.END) and None,
    lambda bench: bench.tell("silent", BranchEventType.COMPACT) and None,
    lambda bench: bench.answered("parent", chain(*"0123456789")) and None,
    lambda bench: bench.say("p1", 2, stored(chain(*"0123456789")[8:], parent=B[-1])),
    switched,
    came_home,
    left_too,
    settled_by_the_heir,
    looked_compacted,
    used_again,
    demoted,
    shown,
    orphaned,
    forgotten_and_known_again,
]


def said(parts: list[Part]) -> dict[str, SavedBranch]:
    return {branch.id: branch for part in parts for branch in part.branches}


@pytest.mark.parametrize("steps", [0, 3, 1000])
@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_between_two_pieces_is_in_it_once(bench: Bench, change: Change, steps: int) -> None:
    bench.tick(1.0)
    bench.say("p1", 1)
    saving = Saving(bench.core)
    for _ in range(steps):
        saving.step()
    parts = [through_disk(saving.take())]
    change(bench)
    parts += rest_of(saving, bench.now, 0.0)
    live = taken(bench.core, bench.now)
    assert said(parts) == said(live)
    again = Directory(bench.core.config, incarnation=2)
    put_back(again, parts, bench.now)
    while again.has_work:
        again.work(10)
    again.check()
    restored = taken(again, bench.now)
    assert said(restored) == said(live)
    assert again.tree.media.of == bench.core.tree.media.of
    assert list(again.events.applied) == list(bench.core.events.applied)
    assert restored[0].end == live[0].end


def test_an_event_between_two_pieces_is_known_as_a_repeat_after_the_restart(bench: Bench) -> None:
    saving = Saving(bench.core)
    while saving.step():
        pass
    parts = [saving.take()]
    event = bench.answered("parent", B, decode="d1")
    parts += rest_of(saving)
    again = Directory(bench.core.config, incarnation=2)
    put_back(again, parts)
    again.on_branch_event(event, 0.0)
    assert again.counters.duplicate_events == 1
    assert again.stats().claims == bench.core.stats().claims


def test_one_that_is_given_up_leaves_no_trace(bench: Bench) -> None:
    saving = Saving(bench.core)
    with pytest.raises(RuntimeError, match="being taken already"):
        Saving(bench.core)
    saving.step()
    bench.core.on_location(KvLocation(node="p1", incarnation=1, seq=2, changes=[stored(chain("x"))]), 0.0)
    bench.core.match(MatchQuery(request="m", hashes=pack(B), branch="parent"), 5.0)
    saving.close()
    journal = bench.core.tree.journal
    assert not journal.open
    assert not [*journal.chains, *journal.branches, *journal.media]
    assert said(taken(bench.core)).keys() == {branch.key[1] for branch in bench.core.branches.newest_first()}


def test_branches_forgotten_between_two_pieces_do_not_come_back() -> None:
    bench = Bench(inactive_branches=2)
    for name in "abcd":
        bench.tell(name, BranchEventType.OPEN)
    bench.tell("a", BranchEventType.END)
    saving = Saving(bench.core)
    while saving.step():
        pass
    parts = [saving.take()]
    for name in "bcd":
        bench.tell(name, BranchEventType.END)
    parts += rest_of(saving)
    again = Directory(bench.core.config, incarnation=2)
    put_back(again, parts)
    assert [branch.key[1] for branch in again.branches.each()] == ["c", "d"]


def test_what_is_said_of_an_idle_branch_between_two_pieces_is_in_it() -> None:
    bench = Bench(branch_lease_s=5.0)
    bench.tell("idle", BranchEventType.OPEN)
    bench.tick(6.0)
    saving = Saving(bench.core)
    while saving.step():
        pass
    parts = [saving.take()]
    bench.tell("idle", BranchEventType.COMPACT, version=3)
    assert said([*parts, *rest_of(saving)])["idle"].version == 3
