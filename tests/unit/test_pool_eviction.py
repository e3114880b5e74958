"""The order in which blocks go, and what never goes."""

import pytest

from schemas.block_key import pack_keys
from schemas.kv import KvReference, ReferenceChange
from schemas.pool import AllocateRequest, CommitRequest, LeaseRequest
from services.kvpool.core.pool import PoolCore
from tests.pool_world import context, evict, refer, store, worth


def test_unreferenced_blocks_go_before_referenced_ones_and_older_before_newer() -> None:
    core = PoolCore("n", 1, 4)
    (a,), (b,), (c,), (d,) = (context(name, 1) for name in "abcd")
    for now, digest in enumerate((a, b, c, d)):
        store(core, [digest], float(now))
    refer(core, [a, c])
    assert evict(core, 4) == [b, d, a, c]


def test_a_block_goes_only_after_every_block_that_extends_it() -> None:
    core = PoolCore("n", 1, 6)
    trunk = context("trunk", 2)
    left, right = context("left", 2), context("right", 2)
    store(core, trunk, 1.0)
    store(core, left, 2.0, parent=trunk[-1])
    store(core, right, 3.0, parent=trunk[-1])
    assert evict(core, 6) == [left[1], left[0], right[1], right[0], trunk[1], trunk[0]]


def test_among_referenced_blocks_the_least_worth_goes_first_and_equals_by_time() -> None:
    core = PoolCore("n", 1, 5)
    (a,), (b,), (c,), (d,), (e,) = (context(name, 1) for name in "abcde")
    for now, digest in enumerate((a, b, c, d, e)):
        store(core, [digest], float(now))
    refer(core, [a, b, c, d])
    worth(core, [a], 200)
    worth(core, [b, d], 4)
    assert evict(core, 5) == [e, b, d, c, a], "c, of which nothing was said, is in between"


def test_a_worth_never_lets_an_unreferenced_block_outlive_a_referenced_one() -> None:
    core = PoolCore("n", 1, 3)
    (a,), (b,), (c,) = (context(name, 1) for name in "abc")
    for now, digest in enumerate((a, b, c)):
        store(core, [digest], float(now))
    refer(core, [c])
    worth(core, [a, b], 255)
    worth(core, [b], 0, referenced=False)
    assert evict(core, 3) == [b, a, c]


def test_what_a_copy_was_worth_is_void_when_it_is_claimed_or_let_go() -> None:
    core = PoolCore("n", 1, 2)
    (a,), (b,) = (context(name, 1) for name in "ab")
    store(core, [a], 0.0)
    store(core, [b], 1.0)
    refer(core, [a, b])
    worth(core, [a], 200)
    refer(core, [a], referenced=False, seq=2)
    refer(core, [a], seq=3)
    assert evict(core, 2) == [a, b]


def test_a_full_word_makes_all_earlier_values_void() -> None:
    core = PoolCore("n", 1, 2)
    (a,), (b,) = (context(name, 1) for name in "ab")
    store(core, [a], 0.0)
    store(core, [b], 1.0)
    refer(core, [a, b])
    worth(core, [a], 200)
    change = ReferenceChange(referenced=True, hashes=pack_keys([a, b]))
    for _ in core.refer(KvReference(node="n", incarnation=2, seq=1, full=True, changes=[change])):
        pass
    core.check()
    assert evict(core, 2) == [a, b]


def test_equal_times_let_the_deepest_block_go_first() -> None:
    core = PoolCore("n", 1, 6)
    short, long = context("short", 2), context("long", 4)
    store(core, short, 1.0)
    store(core, long, 1.0)
    assert evict(core, 2) == [long[3], long[2]]


def test_a_block_counts_as_used_when_an_extension_of_it_was() -> None:
    core = PoolCore("n", 1, 4)
    old, (other,) = context("old", 2), context("other", 1)
    store(core, old, 1.0)
    store(core, [other], 2.0)
    (tail,) = context("tail", 1)
    store(core, [tail], 3.0, parent=old[1])
    assert evict(core, 4) == [other, tail, old[1], old[0]]


def test_a_referenced_extension_keeps_its_unreferenced_prefix() -> None:
    core = PoolCore("n", 1, 3)
    chain, (other,) = context("chain", 2), context("other", 1)
    store(core, chain, 1.0)
    store(core, [other], 2.0)
    refer(core, [chain[1]])
    assert evict(core, 3) == [other, chain[1], chain[0]]


def test_a_block_that_is_being_extended_stays() -> None:
    core = PoolCore("n", 1, 2)
    first, second, third = context("chain", 3)
    store(core, [first], 1.0)
    core.allocate(AllocateRequest(digests=second, parent=first), 1, 2.0)
    reply, _ = core.allocate(AllocateRequest(digests=third), 2, 3.0)
    assert reply.refused == 1
    assert core.locate(first) == 1


def test_an_allocation_never_evicts_what_it_extends_or_contains() -> None:
    core = PoolCore("n", 1, 3)
    chain = context("chain", 4)
    store(core, [chain[0], chain[1]], 1.0)
    store(core, context("other", 1), 2.0)
    reply, _ = core.allocate(AllocateRequest(digests=b"".join(chain)), 1, 3.0)
    assert [slot is not None for slot in reply.slots] == [False, False, True, False]
    assert reply.refused == 1
    assert core.locate(b"".join(chain)) == 2


def test_case_17_head_missing_tail_kept() -> None:
    core = PoolCore("n", 1, 10)
    chain = context("chain", 8)
    store(core, chain, 5.0)
    store(core, context("x", 1), 1.0)
    store(core, context("y", 1), 2.0)
    slot = core.blocks.index.find(chain[1])
    assert slot is not None
    core.discard(slot, core.blocks.slots.generation[slot])
    store(core, context("z", 1), 3.0)
    refer(core, chain[2:], referenced=True, unreachable=True)
    assert core.locate(b"".join(chain)) == 1
    assert core.blocks.order.unreachable_blocks == 6
    assert evict(core, 3) == [chain[7], chain[6], chain[5]]
    assert core.counters.evicted_unreachable == 3


def test_case_19_the_source_of_a_running_load_is_not_the_victim() -> None:
    core = PoolCore("n", 1, 2)
    (x,), (y,), (z,), (w,) = (context(name, 1) for name in "xyzw")
    store(core, [x], 1.0)
    store(core, [y], 2.0)
    core.open_pin("load", 1, 3.0)
    core.pin("load", x, 3.0)
    store(core, [z], 4.0)
    assert (core.locate(x), core.locate(y), core.locate(z)) == (1, 0, 1)
    core.open_pin("other", 1, 5.0)
    core.pin("other", z, 5.0)
    reply, _ = core.allocate(AllocateRequest(digests=w), 1, 6.0)
    assert (reply.slots, reply.refused) == ([None], 1)
    core.unpin("load")
    core.unpin("other")
    assert core.status().pinned_blocks == 0
    assert evict(core, 2) == [x, z]


def test_case_91_compaction_frees_the_old_tail() -> None:
    core = PoolCore("n", 1, 12)
    old = context("A1", 6)
    sleeper, finished, fresh = context("sleeper", 2), context("finished", 2), context("A2", 2)
    store(core, sleeper, 0.0)
    store(core, finished, 100.0)
    store(core, old, 200.0)
    store(core, fresh, 358.0, parent=old[0])
    refer(core, [*sleeper, old[0], *fresh])
    refer(core, old[1:], referenced=False)
    assert evict(core, 12) == [*reversed(finished), *reversed(old[1:]), *reversed(sleeper), *reversed(fresh), old[0]]


def test_case_93_the_order_is_that_of_receipt_here_whatever_others_clocks_say() -> None:
    core = PoolCore("n", 1, 3)
    n1, n2, n3 = (context(name, 1)[0] for name in ("n1", "n2", "n3"))
    for now, digest in ((1.0, n1), (2.0, n2), (3.0, n3)):
        store(core, [digest], now)
    for now, digest in ((4.0, n3), (5.0, n1), (6.0, n2)):
        core.lease(LeaseRequest(id=repr(now), digests=digest), now)
        core.end_lease(repr(now))
    assert evict(core, 3) == [n3, n1, n2]


def test_case_25_one_copy_per_node_and_probes_change_nothing() -> None:
    core = PoolCore("n", 1, 20)
    digests = context("chain", 10)
    for rank in range(4):
        store(core, digests, float(rank), owner=rank + 1)
    assert core.status().used_blocks == 10
    stored = [change for message in core.log.take(1 << 20) for change in message.changes]
    assert len(stored) == 1
    assert len(stored[0].hashes) == 80
    before = (bytes(core.blocks.order.last_used_s), core.status())
    for _ in range(1000):
        assert core.locate(b"".join(digests)) == 10
    assert (bytes(core.blocks.order.last_used_s), core.status()) == before
    slot = core.blocks.index.find(digests[9])
    assert slot is not None
    core.discard(slot, core.blocks.slots.generation[slot])
    removed = [change for message in core.log.take(1 << 20) for change in message.changes]
    assert [len(change.hashes) for change in removed] == [8]


def test_case_89_more_referenced_than_fits() -> None:
    core = PoolCore("n", 1, 100)
    branches = [context(f"branch{i}", 30) for i in range(5)]
    scratch = context("scratch", 10)
    store(core, scratch, 0.0)
    refused = 0
    for turn in range(3):
        for number, branch in enumerate(branches):
            now = 1.0 + turn * 5 + number
            evicted = store(core, branch, now).freed
            refused += len(branch) - core.locate(b"".join(branch))
            refer(core, branch)
            assert turn or number > 2 or not evicted
    assert refused == 0
    assert core.counters.refused_no_room == 0
    assert core.locate(b"".join(scratch)) == 0, "unreferenced blocks went first"
    assert core.counters.evicted_unreferenced == 10
    assert core.status().pinned_blocks == 0
    last = [core.locate(b"".join(branch)) for branch in branches]
    assert last == [0, 10, 30, 30, 30], "the oldest referenced blocks went, from their ends"


@pytest.mark.parametrize("blocks", [500, 4_000])
def test_eviction_does_not_slow_down_with_the_size_of_the_pool(blocks: int) -> None:
    """Counts heap entries, not time: what is kept stays within a constant of what is there."""
    core = PoolCore("n", 1, blocks)
    chains = [context(f"{i}", 100) for i in range(blocks // 100)]
    for now, chain in enumerate(chains):
        reply, _ = core.allocate(AllocateRequest(digests=b"".join(chain)), 1, float(now))
        written = [(*slot, 8, bytes(16)) for slot in reply.slots if slot is not None]
        core.commit(CommitRequest(slots=written), 1, float(now))
    order = core.blocks.order
    for now in range(20):
        for chain in chains:
            core.lease(LeaseRequest(id="r", digests=b"".join(chain)), 1000.0 + now)
    core.end_lease("r")
    assert len(order._heap) <= 2 * len(chains) + 1024
