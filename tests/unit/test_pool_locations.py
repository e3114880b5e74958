"""Location messages: runs, numbers, sizes; snapshots; the device tier."""

from functools import reduce
from operator import xor

import pytest

from schemas.block_key import pack_keys, short_key
from schemas.codec import RejectedMessage, encode
from schemas.kv import BlockMedia, ChangeType, LocationChange, Tier, TierTotal, keys_of
from services.kvpool.core.blocks import AdoptedBlock
from services.kvpool.core.locations import LocationLog
from services.kvpool.core.pool import PoolCore
from tests.pool_world import context, evict, store


def keys(change: LocationChange) -> list[int]:
    found: list[int] = keys_of(change.hashes).tolist()
    return found


def test_a_written_chain_is_one_change_and_one_number() -> None:
    core = PoolCore("n", 7, 8)
    chain = context("chain", 5)
    store(core, chain[:3], 1.0)
    store(core, chain[3:], 2.0, parent=chain[2])
    (message,) = core.log.take(1 << 20)
    assert (message.node, message.incarnation, message.seq) == ("n", 7, 1)
    (change,) = message.changes
    assert (change.type, change.tier, change.parent) == (ChangeType.STORED, Tier.L2, None)
    assert keys(change) == [short_key(digest) for digest in chain]
    assert core.log.take(1 << 20) == []
    digest = reduce(xor, [short_key(digest) for digest in chain])
    beat = core.log.heartbeat()
    assert (beat.node, beat.incarnation, beat.seq, beat.changes) == ("n", 7, 1, [])
    assert (beat.l1, beat.l2) == (TierTotal(blocks=0, digest=0), TierTotal(blocks=5, digest=digest))


def test_a_heartbeat_speaks_of_its_number_and_not_of_what_came_since() -> None:
    core = PoolCore("n", 7, 8)
    chain = context("chain", 3)
    store(core, chain[:2], 1.0)
    core.log.take(1 << 20)
    store(core, chain[2:], 2.0, parent=chain[1])
    beat = core.log.heartbeat()
    assert beat.l2 is not None
    assert (beat.seq, beat.l2.blocks) == (1, 2)
    core.log.take(1 << 20)
    beat = core.log.heartbeat()
    assert beat.l2 is not None
    assert (beat.seq, beat.l2.blocks) == (2, 3)


def test_an_evicted_chain_is_one_change_in_chain_order() -> None:
    core = PoolCore("n", 1, 5)
    chain = context("chain", 5)
    store(core, chain, 1.0)
    core.log.take(1 << 20)
    evict(core, 3)
    (message,) = core.log.take(1 << 20)
    (change,) = message.changes
    assert (change.type, change.parent) == (ChangeType.REMOVED, short_key(chain[1]))
    assert keys(change) == [short_key(digest) for digest in chain[2:]]


def test_messages_stay_below_the_limit_and_removals_lose_their_end_first() -> None:
    log = LocationLog("n", 1)
    for key in range(1, 1001):
        log.stored(Tier.L2, key, key - 1 or None)
    messages = log.take(2000)
    assert all(len(encode(message)) <= 2000 for message in messages)
    assert [message.seq for message in messages] == list(range(1, len(messages) + 1))
    stored = [key for message in messages for change in message.changes for key in keys(change)]
    assert stored == list(range(1, 1001))
    parents = [change.parent for message in messages for change in message.changes]
    assert parents[0] is None
    assert parents[1] == keys(messages[0].changes[0])[-1]

    for key in range(1000, 0, -1):
        log.removed(Tier.L2, key, key - 1 or None)
    removed = [change for message in log.take(2000) for change in message.changes]
    assert keys(removed[0])[-1] == 1000
    assert [keys(change)[0] for change in removed] == sorted((keys(c)[0] for c in removed), reverse=True)
    assert all(change.parent == (keys(change)[0] - 1 or None) for change in removed)


def test_what_comes_and_goes_is_told_in_that_order() -> None:
    log = LocationLog("n", 1)
    log.stored(Tier.L2, 5, None)
    log.removed(Tier.L2, 5, None)
    log.stored(Tier.L2, 5, None)
    (message,) = log.take(1 << 20)
    assert [change.type for change in message.changes] == [ChangeType.STORED, ChangeType.REMOVED, ChangeType.STORED]


def device(type_: ChangeType, digests: list[bytes], parent: bytes = b"", **fields: Tier) -> LocationChange:
    return LocationChange(
        type=type_,
        tier=fields.get("tier", Tier.L1),
        parent=short_key(parent) if parent else None,
        hashes=pack_keys(digests),
        origin=fields.get("origin"),
    )


def test_device_changes_are_numbered_once_and_only_when_they_change_something() -> None:
    log = LocationLog("n", 1)
    chain = context("chain", 4)
    log.device([device(ChangeType.STORED, chain[:3])])
    log.device([device(ChangeType.STORED, chain)])
    (message,) = log.take(1 << 20)
    assert [keys(change) for change in message.changes] == [[short_key(digest) for digest in chain]]
    log.device([device(ChangeType.STORED, chain)])
    assert log.take(1 << 20) == []
    log.device([device(ChangeType.REMOVED, [*chain[2:], *context("unknown", 1)], chain[1])])
    (message,) = log.take(1 << 20)
    assert [(change.type, keys(change)) for change in message.changes] == [
        (ChangeType.REMOVED, [short_key(digest) for digest in chain[2:]])
    ]


def test_moves_out_of_the_device_are_removals_there() -> None:
    log = LocationLog("n", 1)
    chain = context("chain", 2)
    log.device([device(ChangeType.STORED, chain)])
    log.take(1 << 20)
    log.device([device(ChangeType.MOVED, chain, tier=Tier.L2, origin=Tier.L1)])
    (message,) = log.take(1 << 20)
    assert [(change.type, change.tier) for change in message.changes] == [(ChangeType.REMOVED, Tier.L1)]
    assert log.l1 == {}


def test_the_engine_may_not_speak_for_the_pools_tier() -> None:
    log = LocationLog("n", 1)
    changes = [device(ChangeType.STORED, context("a", 1)), device(ChangeType.STORED, context("b", 1), tier=Tier.L2)]
    with pytest.raises(RejectedMessage, match="device change of tier 'l2'"):
        log.device(changes)
    assert not log.pending
    assert log.l1 == {}


def test_losing_the_engine_clears_the_device_tier_once() -> None:
    core = PoolCore("n", 1, 4)
    core.device([device(ChangeType.STORED, context("a", 3))])
    core.engine_lost()
    core.engine_lost()
    (message,) = core.log.take(1 << 20)
    assert [(change.type, change.tier) for change in message.changes] == [
        (ChangeType.STORED, Tier.L1),
        (ChangeType.CLEARED, Tier.L1),
    ]


def test_a_snapshot_is_of_one_number_while_the_pool_goes_on() -> None:
    core = PoolCore("n", 1, 12)
    trunk, left, right = context("trunk", 3), context("left", 4), context("right", 2)
    store(core, trunk, 1.0)
    store(core, left, 2.0, parent=trunk[1])
    store(core, right, 3.0, parent=trunk[2])
    core.device([device(ChangeType.STORED, [*trunk, *left])])
    core.log.take(1 << 20)
    snapshot = core.freeze("s")
    evict(core, 12)
    core.engine_lost()
    found: dict[Tier, list[int]] = {Tier.L1: [], Tier.L2: []}
    cursor: int | None = 0
    parts = 0
    while cursor is not None:
        part = snapshot.part(cursor, 2, 4096)
        assert part is not None
        assert (part.seq, part.snapshot) == (1, "s")
        for change in part.changes:
            assert change.parent is None or change.parent in found[change.tier]
            found[change.tier] += keys(change)
        cursor, parts = part.next_cursor, parts + 1
    assert parts > 4
    assert sorted(found[Tier.L2]) == sorted(short_key(d) for d in [*trunk, *left, *right])
    assert found[Tier.L1] == [short_key(d) for d in [*trunk, *left]]
    assert snapshot.part(0, 2, 4096) is None, "only the last part can be given again"


def test_a_restarted_pool_tells_what_it_adopted_from_its_first_number_on() -> None:
    core = PoolCore("n", 1, 4)
    chain = context("chain", 3)
    store(core, chain, 1.0)
    blocks = [(slot, digest) for digest in chain if (slot := core.blocks.index.find(digest)) is not None]
    later = PoolCore("n", 2, 4)
    later.adopt(
        [5, 5, 5, 5],
        [
            AdoptedBlock(slot, digest, chain[i - 1] if i else b"", 8, bytes(16))
            for i, (slot, digest) in reversed(list(enumerate(blocks)))
        ],
        [],
        2.0,
    )
    later.check()
    (message,) = later.log.take(1 << 20)
    assert (message.incarnation, message.seq) == (2, 1)
    assert [keys(change) for change in message.changes] == [[short_key(digest) for digest in chain]]
    assert evict(later, 4) == list(reversed(chain))


def test_blocks_that_hold_media_say_so_in_changes_and_snapshots() -> None:
    core = PoolCore("n", 7, 8)
    chain = context("chain", 5)
    shown = [BlockMedia(1, b"c" * 32), BlockMedia(3, b"d" * 64), BlockMedia(9, b"e" * 32)]
    core.note_media(b"".join(chain), shown)
    store(core, chain[:3], 1.0)
    store(core, chain[3:], 2.0, parent=chain[2])
    held = pack_keys(chain[2:])
    core.device([LocationChange(type=ChangeType.STORED, tier=Tier.L1, hashes=held, media=[BlockMedia(2, b"f" * 32)])])
    (message,) = core.log.take(1 << 20)
    whole = [*shown[:2], BlockMedia(4, b"f" * 32)]
    assert message.changes[0].media == whole, "also what was told after the block came"
    assert message.changes[1].media == [BlockMedia(1, b"d" * 64), BlockMedia(2, b"f" * 32)]
    part = core.freeze("s").part(0, 1000, 1 << 20)
    assert part is not None
    assert part.changes[0].media == whole
    evict(core, 5)
    removed = [change for message in core.log.take(1 << 20) for change in message.changes]
    assert all(change.media == [] for change in removed)


@pytest.mark.parametrize("limit", [700, 2000])
def test_messages_with_media_keep_their_limit(limit: int) -> None:
    core = PoolCore("n", 7, 64)
    chain = context("chain", 64)
    core.note_media(b"".join(chain), [BlockMedia(number, bytes([number]) * 32) for number in range(64)])
    store(core, chain, 1.0)
    messages = core.log.take(limit)
    assert all(len(encode(message)) <= limit for message in messages)
    said = [
        (key, mark.sha256)
        for message in messages
        for change in message.changes
        for key, mark in zip(keys(change), change.media, strict=True)
    ]
    assert said == [(short_key(digest), bytes([number]) * 32) for number, digest in enumerate(chain)]
    parts, cursor = [], 0
    snapshot = core.freeze("s")
    while True:
        part = snapshot.part(cursor, 1000, limit)
        assert part is not None
        assert len(encode(part)) <= limit
        parts += [mark.sha256 for change in part.changes for mark in change.media]
        if part.next_cursor is None:
            break
        cursor = part.next_cursor
    assert parts == [bytes([number]) * 32 for number in range(64)]
