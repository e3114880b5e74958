"""Pins and leases: ends by release, time, owner; nothing leaks; slots of lost writers wait."""

import psutil

from schemas.pool import AllocateRequest, CommitRequest, LeaseRequest
from services.kvpool.core.pool import PoolCore
from tests.pool_world import context, evict, store


def test_releases_are_idempotent_and_unknown_ids_are_fine() -> None:
    core = PoolCore("n", 1, 4)
    chain = context("chain", 3)
    store(core, chain, 1.0)
    core.lease(LeaseRequest(id="a", digests=b"".join(chain)), 1.0)
    core.lease(LeaseRequest(id="a", digests=b"".join(chain)), 2.0)
    assert core.status().leases == 1
    for _ in range(3):
        core.end_lease("a")
        core.end_lease("never")
        core.unpin("never")
    core.check()
    assert core.status().pinned_blocks == 0


def test_a_lease_ends_by_itself() -> None:
    core = PoolCore("n", 1, 2)
    chain = context("chain", 2)
    store(core, chain, 1.0)
    core.lease(LeaseRequest(id="a", digests=b"".join(chain), ttl_s=5.0), 10.0)
    core.tick(14.9)
    assert core.status().pinned_blocks == 2
    core.tick(15.0)
    assert core.status().pinned_blocks == 0
    assert core.counters.expired_leases == 1
    core.tick(16.0)
    assert core.counters.expired_leases == 1


def test_case_21_looked_up_pinned_never_used() -> None:
    core = PoolCore("n", 1, 40, pin_ttl_s=0.5)
    chains = [context(f"c{i}", 4) for i in range(10)]
    for turn, chain in enumerate(chains):
        store(core, chain, float(turn))
    for i in range(1000):
        now = 100.0 + i / 1000
        core.open_pin(f"r{i}", 1 + i % 5, now)
        core.pin(f"r{i}", b"".join(chains[i % 10]), now)
        if i % 10 < 3:
            core.unpin(f"r{i}")
        elif i % 10 < 7:
            core.unpin(f"r{i}")
            core.unpin(f"r{i}")
    core.check()
    assert core.status().pinned_blocks > 0
    core.tick(101.9)
    core.check()
    assert core.status().pinned_blocks == 0
    assert len(evict(core, 40)) == 40


def test_holds_of_two_readers_are_two() -> None:
    core = PoolCore("n", 1, 2)
    (digest,) = context("x", 1)
    store(core, [digest], 1.0)
    for id_ in ("a", "b"):
        core.open_pin(id_, 1, 1.0)
        core.pin(id_, digest, 1.0)
    core.unpin("a")
    assert core.status().pinned_blocks == 1
    core.unpin("b")
    assert core.status().pinned_blocks == 0


def test_a_lost_connection_gives_up_pins_at_once_and_slots_when_its_process_has_ended() -> None:
    core = PoolCore("n", 1, 4, aside_s=30.0)
    here, coming = context("here", 2), context("coming", 2)
    store(core, here, 1.0, owner=5)
    core.open_pin("p", 5, 1.0)
    core.pin("p", b"".join(here), 1.0)
    reply, _ = core.allocate(AllocateRequest(digests=b"".join(coming)), 5, 1.0)
    core.drop_owner(5, 2.0)
    core.check()
    assert core.status().pinned_blocks == 0
    assert core.is_awaited(5)
    again, _ = core.allocate(AllocateRequest(digests=b"".join(coming)), 6, 2.0)
    assert not set(again.slots) & set(reply.slots), "a slot that may still be written is not used"
    effects = core.end_owner(5, 3.0)
    core.check()
    assert sorted(effects.freed) == sorted(slot for slot, _ in filter(None, reply.slots))
    late = CommitRequest(slots=[(slot, gen, 8, bytes(16)) for slot, gen in filter(None, reply.slots)])
    assert core.commit(late, 5, 4.0)[0].committed == 0
    assert core.counters.stale_commits == 2


def test_slots_of_a_writer_nobody_can_watch_wait_for_a_time() -> None:
    core = PoolCore("n", 1, 2, aside_s=30.0)
    core.allocate(AllocateRequest(digests=b"".join(context("x", 2))), 5, 1.0)
    core.drop_owner(5, 2.0)
    assert core.tick(31.9).freed == []
    assert len(core.tick(32.0).freed) == 2
    core.check()


def test_case_1_slots_of_a_copy_that_still_runs_are_never_given_out() -> None:
    core = PoolCore("n", 1, 4)
    a, b, c = context("a", 2), context("b", 2), context("c", 2)
    first, _ = core.allocate(AllocateRequest(digests=b"".join(a)), 1, 1.0)
    core.drop_owner(1, 2.0, ends=False)
    second, _ = core.allocate(AllocateRequest(digests=b"".join(b)), 2, 2.0)
    assert {slot for slot, _ in filter(None, first.slots)} == {0, 1}
    assert {slot for slot, _ in filter(None, second.slots)} == {2, 3}
    third, _ = core.allocate(AllocateRequest(digests=b"".join(c)), 3, 1e9)
    assert third.refused == 2
    assert core.tick(1e9).freed == []
    core.end_owner(1, 1e9)
    third, _ = core.allocate(AllocateRequest(digests=b"".join(c)), 3, 1e9)
    assert {slot for slot, _ in filter(None, third.slots)} == {0, 1}
    assert all(generation == 2 for _, generation in filter(None, third.slots))


def test_a_block_found_wrong_while_it_is_read_is_given_out_only_after_the_readers() -> None:
    core = PoolCore("n", 1, 1)
    (x,), (y,) = context("x", 1), context("y", 1)
    store(core, [x], 1.0)
    core.lease(LeaseRequest(id="r", digests=x), 1.0)
    slot = core.blocks.index.find(x)
    assert slot is not None
    assert core.discard(slot, core.blocks.slots.generation[slot]).freed == [slot]
    core.check()
    assert core.locate(x) == 0
    assert core.allocate(AllocateRequest(digests=y), 1, 2.0)[0].refused == 1
    core.end_lease("r")
    core.check()
    assert core.allocate(AllocateRequest(digests=y), 1, 2.0)[0].refused == 0


def test_two_digests_of_one_short_key_are_never_here_together() -> None:
    core = PoolCore("n", 1, 4)
    (digest,) = context("x", 1)
    twin = digest[:8] + bytes(24)
    store(core, [digest], 1.0)
    assert core.locate(twin) == 0
    reply, _ = core.allocate(AllocateRequest(digests=twin + context("y", 1)[0]), 1, 2.0)
    assert (reply.slots, reply.refused) == ([None, None], 2)
    assert core.counters.refused_collision == 1
    core.check()


def test_case_27_small_views_keep_no_big_buffers_alive() -> None:
    core = PoolCore("n", 1, 100)
    digests = [context(f"{i}", 1)[0] for i in range(1000)]

    def cycles(count: int) -> None:
        for i in range(count):
            request = AllocateRequest(digests=digests[i % 1000])
            reply, _ = core.allocate(request, 1, float(i))
            core.commit(CommitRequest(slots=[(*s, 8, bytes(16)) for s in reply.slots if s is not None]), 1, float(i))
            if i % 50 == 0:
                core.log.take(1 << 20)

    memory = psutil.Process().memory_info
    cycles(2_000)
    early = memory().rss
    cycles(18_000)
    assert memory().rss - early < 10 << 20
    assert len(core.blocks.index) == 100
    core.check()
