"""Following the directory: order, gaps, restarts; bits reach the blocks that are here."""

from schemas.block_key import pack_keys
from schemas.kv import KvReference, ReferenceChange
from services.kvpool.core.pool import SLICE_KEYS, PoolCore
from services.kvpool.core.references import MAX_HELD_BACK, ReferenceFollower
from tests.pool_world import context, refer, store


def message(seq: int, *, full: bool = False, incarnation: int = 1) -> KvReference:
    return KvReference(node="n", incarnation=incarnation, seq=seq, full=full, changes=[])


def applied(follower: ReferenceFollower, *messages: KvReference) -> list[int]:
    return [ready.seq for given in messages for ready in follower.accept(given)]


def test_nothing_is_applied_before_the_first_full_message() -> None:
    follower = ReferenceFollower()
    assert applied(follower, message(4), message(5)) == []
    assert follower.behind
    assert applied(follower, message(4, full=True)) == [4, 5]
    assert not follower.behind
    assert applied(follower, message(6)) == [6]


def test_a_gap_is_closed_by_one_full_message_and_what_followed_it() -> None:
    follower = ReferenceFollower()
    applied(follower, message(1, full=True))
    assert applied(follower, message(2), message(4), message(5)) == [2]
    assert follower.behind
    assert follower.gaps == 1
    assert applied(follower, message(4, full=True)) == [4, 5]
    assert not follower.behind


def test_a_full_message_that_leaves_another_gap_leaves_it_open() -> None:
    follower = ReferenceFollower()
    applied(follower, message(1, full=True))
    assert applied(follower, message(7)) == []
    assert applied(follower, message(5, full=True)) == [5]
    assert follower.behind
    assert applied(follower, message(6, full=True)) == [6, 7]
    assert not follower.behind


def test_duplicates_and_late_messages_are_ignored() -> None:
    follower = ReferenceFollower()
    applied(follower, message(3, full=True))
    assert applied(follower, message(2), message(3), message(3, full=True)) == []
    assert follower.ignored == 3
    assert not follower.behind


def test_a_restarted_directory_is_followed_from_its_full_message_on() -> None:
    follower = ReferenceFollower()
    applied(follower, message(400, full=True))
    assert applied(follower, message(1, incarnation=2)) == []
    assert follower.behind
    assert applied(follower, message(401)) == [], "the former directory has no say any more"
    assert applied(follower, message(1, full=True, incarnation=2), message(2, incarnation=2)) == [1, 2]


def test_a_directory_whose_incarnation_went_back_is_not_followed_but_asked() -> None:
    follower = ReferenceFollower()
    applied(follower, message(1, full=True, incarnation=9))
    assert applied(follower, message(1, full=True, incarnation=5)) == []
    assert follower.behind, "so it hears of 9 and speaks above it"
    assert applied(follower, message(1, full=True, incarnation=10)) == [1]
    assert not follower.behind


def test_after_a_loss_that_nothing_shows_the_full_state_is_taken_again() -> None:
    follower = ReferenceFollower()
    applied(follower, message(3, full=True))
    follower.lose()
    assert follower.behind
    assert applied(follower, message(3, full=True)) == [3], "though its number is not new"
    assert not follower.behind


def test_what_is_held_back_is_bounded() -> None:
    follower = ReferenceFollower()
    assert applied(follower, *(message(seq) for seq in range(2, MAX_HELD_BACK + 100))) == []
    assert len(applied(follower, message(1, full=True))) == MAX_HELD_BACK + 1


def test_bits_reach_present_blocks_only_and_leave_with_them() -> None:
    core = PoolCore("n", 1, 4)
    here, away = context("here", 2), context("away", 2)
    store(core, here, 1.0)
    refer(core, [*here, *away])
    assert core.status().referenced_blocks == 2
    store(core, away, 2.0)
    assert core.status().referenced_blocks == 2, "the directory says it again when the copy is reported"
    slot = core.blocks.index.find(here[1])
    assert slot is not None
    core.discard(slot, core.blocks.slots.generation[slot])
    assert core.status().referenced_blocks == 1


def test_a_full_message_replaces_all_that_was_known() -> None:
    core = PoolCore("n", 1, 4)
    digests = [context(name, 1)[0] for name in "abcd"]
    store_all = [store(core, [digest], 1.0) for digest in digests]
    assert len(store_all) == 4
    refer(core, digests[:3])
    refer(core, digests[2:3], referenced=True, unreachable=True)
    change = ReferenceChange(referenced=True, hashes=pack_keys(digests[3:]))
    for _ in core.refer(KvReference(node="n", incarnation=1, seq=9, full=True, changes=[change])):
        pass
    core.check()
    assert core.status().referenced_blocks == 1
    assert core.blocks.order.unreachable_blocks == 0


def test_a_long_message_is_applied_in_slices_while_slots_change_hands() -> None:
    blocks = 3 * SLICE_KEYS
    core = PoolCore("n", 1, blocks)
    chain = context("chain", blocks)
    store(core, chain, 1.0)
    change = ReferenceChange(referenced=True, hashes=pack_keys(chain))
    slices = core.refer(KvReference(node="n", incarnation=1, seq=1, full=True, changes=[change]))
    for _ in range(3):
        next(slices)
    fresh = context("fresh", 10)
    store(core, fresh, 2.0)
    steps = sum(1 for _ in slices)
    assert steps >= 3
    core.check()
    assert core.status().referenced_blocks == blocks - 10, "slots that changed hands kept no bit of the former block"
