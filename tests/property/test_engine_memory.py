"""Device memory, batches and mirrors of the engine hold together under any sequence of uses."""

from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.block_key import block_digests, short_key, token_bytes
from schemas.kv import ChangeType, LocationChange, Tier, keys_of
from schemas.phase import Phase
from schemas.serve import Sampling
from services.engine.backend import Leg, LegKey
from services.engine.core.batching import PrefillWork, attention_pairs, compose_prefill, finish_prefill
from services.engine.core.device_mirror import DeviceMirror
from services.engine.timed.device import DeviceCache
from services.engine.timed.settings import TimedSettings
from services.engine.timed.state import Memory

SIZE = 4
TRUNKS = [list(range(100 * trunk, 100 * trunk + 24)) for trunk in range(3)]
legs = st.tuples(
    st.integers(0, 2),
    st.integers(1, 24),
    st.integers(0, 5),
    st.sampled_from((Phase.PREFILL, Phase.DECODE)),
    st.booleans(),
)
ops = st.lists(st.one_of(st.tuples(st.just("open"), legs), st.tuples(st.just("close"), st.integers(0, 9))), max_size=60)


def leg_of(number: int, trunk: int, length: int, tail: int, phase: Phase) -> Leg:
    """A prompt that shares its first `length` tokens with others of its trunk."""
    tokens = TRUNKS[trunk][:length] + [10_000 * number + i for i in range(tail)]
    packed = token_bytes(tokens)
    return Leg(
        key=LegKey(f"q{number}", 1, phase),
        tokens=packed,
        prompt_tokens=len(tokens),
        sampling=Sampling(max_new_tokens=3),
        room=1,
        peer="",
        rendezvous="",
        digests=tuple(block_digests(packed, SIZE)),
    )


@given(ops=ops)
@settings(max_examples=150, deadline=None)
def test_memory_is_accounted_for_and_its_changes_tell_what_it_holds(ops: list) -> None:
    memory = Memory(TimedSettings(block_size=SIZE, l1_tokens=64, max_context_tokens=64), DeviceCache(16))
    mirror = DeviceMirror()
    opened: list[Leg] = []
    for number, (what, argument) in enumerate(ops):
        if what == "open":
            trunk, length, tail, phase, whole = argument
            leg = leg_of(number, trunk, length, tail, phase)
            if -(-(leg.prompt_tokens + 3) // SIZE) <= memory.device.free_blocks:
                hold = memory.open(leg)
                memory.publish(hold, list(leg.digests), len(leg.digests) if whole else len(leg.digests) // 2, phase)
                opened.append(leg)
        elif opened:
            memory.close(opened.pop(argument % len(opened)).key)
        memory.check()
        for change in memory.device.changes():
            mirror.apply(change)
        assert set(mirror.parents) == {short_key(digest) for digest in memory.device._blocks}
        for leg in opened:
            assert mirror.leading(map(short_key, leg.digests)) == memory.device.hits(leg.digests)
        for key, parent in mirror.parents.items():
            assert parent is None or parent in mirror.parents, f"{key} is held without the block before it"
    for leg in opened:
        memory.close(leg.key)
    memory.check()
    assert memory.device.free_blocks == memory.device.capacity
    memory.device.drop_unless_prefill()
    assert all(block.by_prefill for block in memory.device._blocks.values())


def test_both_legs_of_a_node_share_one_hold() -> None:
    memory = Memory(TimedSettings(block_size=SIZE, l1_tokens=64, max_context_tokens=64), DeviceCache(16))
    decode = leg_of(1, 0, 24, 0, Phase.DECODE)
    prefill = leg_of(1, 0, 24, 0, Phase.PREFILL)
    memory.open(decode)
    free = memory.device.free_blocks
    hold = memory.open(prefill)
    assert memory.device.free_blocks == free
    memory.publish(hold, list(prefill.digests), 6, Phase.PREFILL)
    memory.close(decode.key)
    memory.check()
    assert memory.device.free_blocks == free, "the other leg still uses it"
    memory.close(prefill.key)
    assert memory.device.free_blocks == 16


def test_what_nobody_uses_goes_deepest_first() -> None:
    device = DeviceCache(6)
    old, new = (leg_of(n, n, 12, 0, Phase.DECODE).digests for n in (0, 1))
    for digests in (old, new):
        device.take(3)
        device.publish(digests, b"", by_prefill=False)
        device.unlock(digests)
    device.lock(old)
    device.unlock(old)
    device.changes()
    device.take(4)
    removed = [change for change in device.changes() if change.type is ChangeType.REMOVED]
    assert [keys_of(change.hashes).tolist() for change in removed] == [
        [short_key(digest) for digest in new],
        [short_key(old[2])],
    ]
    assert (device.hits(old), device.hits(new)) == (2, 0)


@given(
    prompts=st.lists(st.tuples(st.integers(1, 200), st.integers(0, 199)), min_size=1, max_size=20),
    batch_tokens=st.integers(1, 64),
)
def test_every_prompt_token_is_computed_once(prompts: list[tuple[int, int]], batch_tokens: int) -> None:
    works = [PrefillWork(total, min(cached, total - 1), min(cached, total - 1)) for total, cached in prompts]
    expected = [(work.left, attention_pairs(work.left, work.done), work.restored_tokens) for work in works]
    tokens = restored = 0
    pairs = 0.0
    while (batch := compose_prefill([work for work in works if work.left], batch_tokens)) is not None:
        assert 0 < batch.terms.uncached_tokens <= batch_tokens
        tokens += batch.terms.uncached_tokens
        pairs += batch.terms.attention_pairs
        restored += batch.terms.restored_tokens
        finish_prefill(batch)
        for work in works:
            work.check()
    assert tokens == sum(each[0] for each in expected)
    assert pairs == sum(each[1] for each in expected)
    assert restored == sum(each[2] for each in expected)


def test_a_mirror_said_again_gives_the_same_mirror() -> None:
    mirror = DeviceMirror()
    digests = leg_of(0, 0, 20, 0, Phase.PREFILL).digests
    device = DeviceCache(8)
    device.take(5)
    device.publish(digests, b"", by_prefill=True)
    for change in device.changes():
        mirror.apply(change)
    again = DeviceMirror()
    for change in mirror.snapshot():
        again.apply(change)
    assert again.parents == mirror.parents
    assert len(mirror.snapshot()) == 1
    again.apply(LocationChange(type=ChangeType.CLEARED, tier=Tier.L1))
    assert again.snapshot() == []
