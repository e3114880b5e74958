"""The small parts of the directory's core against what they stand for: sets, dictionaries, one message at a time."""

import random

import numpy as np
from directory_model import keys_of, pack
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.kv import ChangeType, KvLocation, LocationChange, Tier
from services.directory.core import spans as sets
from services.directory.core.key_index import LOT_KEYS, LOTS, MERGED_AT_ONCE, KeyIndex
from services.directory.core.node_feed import Arrival, NodeFeed
from services.directory.core.pending import STRIDE, PendingPrefixes
from services.directory.core.prefix_tree import PrefixTree
from services.directory.core.run import Ends, keys_view

intervals = st.tuples(st.integers(0, 30), st.integers(1, 10)).map(lambda pair: (pair[0], pair[0] + pair[1]))
operations = st.lists(st.tuples(st.booleans(), intervals), max_size=30)


def members(spans: list[int]) -> set[int]:
    return {number for first, last in zip(spans[::2], spans[1::2], strict=True) for number in range(first, last)}


def built(steps: list[tuple[bool, tuple[int, int]]]) -> tuple[list[int], set[int]]:
    """Spans and the set they stand for, after the same operations; each operation's answer is checked."""
    spans: list[int] = []
    truth: set[int] = set()
    for added, (first, last) in steps:
        piece = set(range(first, last))
        if added:
            assert members(sets.add(spans, first, last)) == piece - truth
            truth |= piece
        else:
            assert members(sets.remove(spans, first, last)) == piece & truth
            truth -= piece
        sets.check(spans)
        assert members(spans) == truth
    return spans, truth


@settings(deadline=None)
@given(operations, operations, st.integers(0, 45))
def test_spans_are_sets_of_offsets(one: list, other: list, at: int) -> None:
    (a, a_set), (b, b_set) = built(one), built(other)
    for result, expected in ((sets.both(a, b), a_set & b_set), (sets.minus(a, b), a_set - b_set)):
        sets.check(result)
        assert members(result) == expected
    assert sets.size(a) == len(a_set)
    assert sets.reach(a, at) == next(number for number in range(at, 100) if number not in a_set)


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5)), max_size=40))
def test_ends_count_prefixes(steps: list[tuple[bool, int]]) -> None:
    ends, truth = Ends(), []
    for added, end in steps:
        if added:
            ends.add(end)
            truth.append(end)
        elif end in truth:
            ends.remove(end)
            truth.remove(end)
        assert ends.top == max(truth, default=0)
        assert ends.total() == len(truth)
        assert all(ends.over(offset) == sum(end > offset for end in truth) for offset in range(6))


def test_the_index_names_the_run_of_every_key_at_any_size() -> None:
    rnd = random.Random(1)
    index, truth, runs = KeyIndex(), dict[int, int | None](), list[bytes]()
    for ident in range(110):
        keys = [rnd.getrandbits(64) for _ in range(rnd.randint(1, 9000))]
        runs.append(pack(keys))
        index.put(runs[-1], ident)
        truth |= dict.fromkeys(keys, ident)
        for taken, chance in ((True, 0.4), (False, 0.1)):
            if rnd.random() < chance:
                other = rnd.randrange(len(runs))
                if (truth[keys_view(runs[other])[0]] is None) is not taken:
                    (index.take if taken else index.put)(runs[other], other)
                    truth |= dict.fromkeys(keys_view(runs[other]), None if taken else other)
    assert len(truth) > 3 * LOTS * LOT_KEYS * MERGED_AT_ONCE // 4
    for key in rnd.sample(list(truth), 3000):
        assert truth[key] is None or truth[key] in index.find(key)
        assert truth[key] is None or index.may_have(key)
    assert not any(list(index.find(rnd.getrandbits(64))) for _ in range(100))
    index.check()


def test_most_new_keys_are_known_as_such_before_while_and_after_the_filter_grows() -> None:
    rng, index = np.random.default_rng(3), KeyIndex()
    keys = rng.integers(0, 1 << 64, 1_300_000, np.uint64)
    strangers = rng.integers(0, 1 << 64, 1_000, np.uint64).tolist()
    for start in range(0, len(keys), 1_000):
        index.put(keys[start : start + 1_000].tobytes(), start)
        if start % 26_000 == 0:
            assert all(index.may_have(key) for key in keys[: start + 1_000 : 97].tolist())
            assert sum(map(index.may_have, strangers)) < 350


def test_the_filter_forgets_what_is_long_gone() -> None:
    rng, index = np.random.default_rng(4), KeyIndex()
    for ident in range(1_200):
        keys = rng.integers(0, 1 << 64, 1_000, np.uint64).tobytes()
        index.put(keys, ident)
        index.take(keys, ident)
    assert sum(map(index.may_have, rng.integers(0, 1 << 64, 1_000, np.uint64).tolist())) < 350


def test_what_was_put_and_taken_back_is_not_kept() -> None:
    rnd, index = random.Random(2), KeyIndex()
    for ident in range(1500):
        keys = pack([rnd.getrandbits(64) for _ in range(100)])
        index.put(keys, ident)
        index.take(keys, ident)
    assert index.entries() < 4 * LOTS * LOT_KEYS


contexts = st.lists(st.integers(0, 2), min_size=1, max_size=8).map(tuple)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(contexts, st.integers(0, 7)), max_size=25), st.randoms(use_true_random=False))
def test_the_tree_is_the_same_in_whatever_order_its_pieces_come(pieces: list, rnd: random.Random) -> None:
    pieces = [(context, cut % len(context)) for context, cut in pieces]
    known = {key for context, cut in pieces for key in keys_of(context)[cut:]}
    tree = PrefixTree()
    rnd.shuffle(pieces)
    for context, cut in pieces:
        keys = keys_of(context)
        inserted = tree.insert(keys[cut - 1] if cut else None, keys_view(pack(keys[cut:])))
        found = [run.keys[offset] for run, first, last in inserted.pieces for offset in range(first, last)]
        assert found == keys[cut:]
    tree.check()
    assert {key for run in tree.known() for key in run.keys} == known
    for context, _ in pieces:
        keys = keys_of(context)
        reached = next((number for number, key in enumerate(keys) if key not in known), len(keys))
        assert sum(same for _, same in tree.walk(keys_view(pack(keys)))) == reached
    while tree.forget(0):
        pass
    tree.check()
    assert (tree.blocks, tree.idle_blocks, sum(1 for _ in tree.known())) == (0, 0, 0)


@settings(deadline=None)
@given(st.lists(st.sampled_from(("next", "repeat", "skip", "beat", "load")), max_size=40))
def test_a_feed_applies_each_message_once_and_in_order(steps: list[str]) -> None:
    feed, sent, applied = NodeFeed(buffer_messages=4), 0, []

    def message(seq: int, *, empty: bool = False) -> KvLocation:
        changes = [] if empty else [LocationChange(type=ChangeType.REMOVED, tier=Tier.L2)]
        return KvLocation(node="n", incarnation=7, seq=seq, changes=changes)

    for step in steps:
        if step == "load" and feed.wants(7, sent):
            feed.loaded(7, sent)
            applied = [sent] if sent else []
            while (following := feed.following()) is not None:
                applied.append(following.seq)
        elif step == "beat":
            feed.offer(message(sent, empty=True))
            assert feed.synced == (feed.seq == sent)
        else:
            sent += {"next": 1, "skip": 2}.get(step, 0)
            if sent and feed.offer(message(sent)).arrival is Arrival.APPLIED:
                applied.append(sent)
        feed.check()
        assert applied == list(range(applied[0], feed.seq + 1)) if applied else feed.seq == 0


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3 * STRIDE), st.integers(0, 3 * STRIDE)), min_size=2, max_size=6),
    st.randoms(use_true_random=False),
)
def test_who_computes_a_block_is_found_wherever_prompts_begin_and_part(
    cut: list[tuple[int, int]], rnd: random.Random
) -> None:
    """Prompt n shares `common` blocks with all, and its first `known` blocks lie somewhere when it comes."""
    pending = PendingPrefixes(lease_s=10.0)
    alive: dict[int, tuple[int, list[int]]] = {}
    for number, (common, known) in enumerate(cut):
        keys = keys_of((0,) * common + (number + 1,) * (4 * STRIDE))
        found = pending.ahead(known, keys_view(pack(keys)), f"r{number}")
        expected = next(
            (n for n, (start, other) in alive.items() if start <= known and other[known] == keys[known]), None
        )
        assert (None if found is None else int(found[1].request[1:])) == expected
        if found is not None and expected is not None:
            same = [mine == other for mine, other in zip(keys, alive[expected][1], strict=False)]
            assert found[0] == same.index(False)
        pending.add(f"r{number}", known, keys_view(pack(keys)), 0.0)
        alive[number] = known, keys
        if rnd.random() < 0.3:
            gone = rnd.choice(list(alive))
            pending.release(f"r{gone}")
            del alive[gone]
        pending.check()


def test_the_oldest_of_several_followers_comes_next() -> None:
    pending = PendingPrefixes(lease_s=10.0)
    shared = (1, STRIDE + 1, 1, STRIDE + 1)
    for number, common in enumerate(shared):
        keys = keys_of((0,) * common + (number + 1,) * (4 * STRIDE))
        pending.add(f"r{number}", 0, keys_view(pack(keys)), 0.0)
    for gone, oldest in (("r0", "r1"), ("r1", "r2"), ("r2", "r3")):
        pending.release(gone)
        found = pending.ahead(0, keys_view(pack(keys_of((0,) * (4 * STRIDE)))), "new")
        assert found is not None
        assert found[1].request == oldest
        pending.check()


@settings(deadline=None)
@given(st.lists(st.integers(0, 3 * STRIDE), min_size=2, max_size=6), st.randoms(use_true_random=False))
def test_siblings_find_the_oldest_request_with_their_prefix(shared: list[int], rnd: random.Random) -> None:
    """Prompt n shares `shared[n]` blocks with all and goes on alone."""
    pending = PendingPrefixes(lease_s=10.0)
    prompts = [keys_of((0,) * common + (number + 1,) * (4 * STRIDE)) for number, common in enumerate(shared)]
    alive: list[int] = []
    for number, keys in enumerate(prompts):
        view = keys_view(pack(keys))
        found = pending.ahead(0, view, f"r{number}")
        if found is not None:
            other = int(found[1].request[1:])
            assert found[0] == min(shared[number], shared[other])
            assert other == min(n for n in alive if min(shared[n], shared[number]) >= 1)
        else:
            assert not any(min(shared[n], shared[number]) >= 1 for n in alive)
        pending.add(f"r{number}", 0, view, float(number) / 100)
        alive.append(number)
        pending.check()
        if rnd.random() < 0.3:
            gone = rnd.choice(alive)
            pending.release(f"r{gone}")
            alive.remove(gone)
            pending.check()
    assert pending.expire(1e9) == len(alive)
    pending.check()
