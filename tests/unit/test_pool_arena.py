"""The arena file: layout, lookups, adoption, refusal; reader and writer agree."""

import hashlib
import random
from pathlib import Path

import numpy as np
import pytest

from services.arena import ArenaError, ArenaIdentity, ArenaReader, SlotState, fingerprint_of
from services.kvpool.arena import Arena
from services.kvpool.core.blocks import Effects
from tests.pool_world import content, context

IDENTITY = ArenaIdentity(model="tiny", block_size=16, block_bytes=5000, key_version="sha256-u32-v1")


def opened(path: Path, slots: int = 8, incarnation: int = 1) -> Arena:
    """An arena that readers may map."""
    arena, found = Arena.open(path, IDENTITY, slots, incarnation)
    arena.go_live(found.blocks, Effects())
    return arena


def put(arena: Arena, slot: int, digest: bytes, generation: int = 1, parent: bytes = b"") -> None:
    """Write a block as the pool's clients do."""
    arena.perform(Effects(begun=[(slot, generation, digest, parent)]))
    reader = ArenaReader(arena.path, writable=True)
    fingerprint = reader.write(slot, generation, content(digest, 5000))
    assert fingerprint is not None
    arena.perform(Effects(committed=[(slot, 5000, fingerprint)]))
    arena.check()


def test_a_written_block_is_found_and_read_back(tmp_path: Path) -> None:
    arena = opened(tmp_path / "a")
    reader = ArenaReader(arena.path)
    (digest,) = context("x", 1)
    assert reader.find(digest) is None
    put(arena, 3, digest, generation=7)
    found = reader.find(digest)
    assert found is not None
    assert (found.slot, found.generation, found.length) == (3, 7, 5000)
    assert found.fingerprint == fingerprint_of(content(digest, 5000))
    buffer = bytearray(6000)
    assert reader.read_into(3, 7, buffer)
    assert bytes(buffer[:5000]) == content(digest, 5000).tobytes()
    assert reader.current(3, 7, digest)
    assert not reader.current(3, 7, bytes(32))


def test_lookup_gives_the_leading_run(tmp_path: Path) -> None:
    arena = opened(tmp_path / "a")
    chain = context("chain", 5)
    for slot, digest in enumerate([chain[0], chain[1], chain[3]]):
        put(arena, slot, digest)
    reader = ArenaReader(arena.path)
    assert [info.slot for info in reader.lookup(b"".join(chain))] == [0, 1]
    assert reader.lookup(b"") == []
    assert [info.slot for info in reader.lookup(chain[3] + chain[0])] == [2, 0]


def test_a_stale_generation_is_not_read(tmp_path: Path) -> None:
    arena = opened(tmp_path / "a")
    first, second = context("x", 2)
    put(arena, 0, first, generation=1)
    reader = ArenaReader(arena.path)
    arena.perform(Effects(freed=[0]))
    assert reader.find(first) is None
    assert not reader.read_into(0, 1, bytearray(5000))
    put(arena, 0, second, generation=2)
    assert not reader.read_into(0, 1, bytearray(5000))
    assert reader.read_into(0, 2, bytearray(5000))


def test_a_slot_taken_back_is_not_written(tmp_path: Path) -> None:
    arena = opened(tmp_path / "a")
    (digest,) = context("x", 1)
    arena.perform(Effects(begun=[(0, 1, digest, b"")]))
    writer = ArenaReader(arena.path, writable=True)
    arena.perform(Effects(freed=[0]))
    assert writer.write(0, 1, bytes(5000)) is None
    arena.perform(Effects(begun=[(0, 2, digest, b"")]))
    assert writer.write(0, 1, bytes(5000)) is None
    assert writer.write(0, 2, bytes(5000)) is not None


def test_buffers_of_the_wrong_size_are_named(tmp_path: Path) -> None:
    arena = opened(tmp_path / "a")
    (digest,) = context("x", 1)
    put(arena, 0, digest)
    reader = ArenaReader(arena.path, writable=True)
    with pytest.raises(ValueError, match="block of 5000 bytes, buffer of 10"):
        reader.read_into(0, 1, bytearray(10))
    with pytest.raises(ValueError, match="block of 9000 bytes, slots have 8192"):
        reader.write(0, 1, bytes(9000))
    with pytest.raises(ValueError, match=r"slot 8 is not in 0\.\.7"):
        reader.life(8)


def test_index_survives_any_order_of_coming_and_going(tmp_path: Path) -> None:
    """Keys that share few homes: chains in the index are long, wrap around and are taken apart."""
    slots = 30
    arena = opened(tmp_path / "a", slots=slots)
    reader = ArenaReader(arena.path)
    rng = random.Random(1)
    homes = [rng.randrange(arena.layout.buckets - 4, arena.layout.buckets) for _ in range(60)]
    firsts = [home + (i << 40) for i, home in enumerate(homes)]  # the pool holds no two digests of one short key
    digests = [first.to_bytes(8, "little") + hashlib.sha256(bytes([i])).digest()[8:] for i, first in enumerate(firsts)]
    held: dict[int, bytes] = {}
    for generation in range(1, 400):
        slot = rng.randrange(slots)
        if slot in held:
            arena.perform(Effects(freed=[slot]))
            del held[slot]
        else:
            digest = rng.choice([d for d in digests if d not in held.values()])
            arena.perform(Effects(begun=[(slot, generation, digest, b"")]))
            arena.perform(Effects(committed=[(slot, 8, bytes(16))]))
            held[slot] = digest
        arena.check()
        for at, digest in held.items():
            found = reader.find(digest)
            assert found is not None
            assert found.slot == at
            assert reader.lookup(digest) == [found]
        assert all(reader.find(digest) is None for digest in digests if digest not in held.values())


def test_restart_adopts_committed_slots_and_lists_torn_ones(tmp_path: Path) -> None:
    arena = opened(tmp_path / "a")
    chain = context("chain", 3)
    put(arena, 2, chain[0], generation=4)
    put(arena, 5, chain[1], generation=6, parent=chain[0])
    arena.perform(Effects(begun=[(1, 9, chain[2], chain[1])]))
    reader = ArenaReader(arena.path)
    arena.leave()
    assert not reader.live
    with pytest.raises(ArenaError, match="is not live"):
        ArenaReader(arena.path)

    later, found = Arena.open(arena.path, IDENTITY, 8, 2)
    assert [(block.slot, block.digest, block.parent) for block in found.blocks] == [
        (2, chain[0], b""),
        (5, chain[1], chain[0]),
    ]
    assert found.torn == [1]
    assert found.generations[2] == 4
    assert found.generations[1] == 9
    later.go_live(found.blocks, Effects())
    later.check()
    assert not reader.live, "it is the arena of another life"
    fresh = ArenaReader(arena.path)
    assert fresh.life(2)[2] is SlotState.ADOPTED
    assert [info.slot for info in fresh.lookup(b"".join(chain))] == [2, 5]
    assert fresh.read_into(2, 4, bytearray(5000))


def test_an_adopted_block_with_wrong_bytes_is_never_read(tmp_path: Path) -> None:
    arena = opened(tmp_path / "a")
    (digest,) = context("x", 1)
    put(arena, 0, digest)
    arena.view(0)[4999] ^= 1
    arena.leave()
    later, found = Arena.open(arena.path, IDENTITY, 8, 2)
    later.go_live(found.blocks, Effects())
    reader = ArenaReader(arena.path)
    assert not reader.read_into(0, 1, bytearray(5000))
    assert not later.matches(0, 5000, found.blocks[0].fingerprint)
    later.view(0)[4999] ^= 1
    assert reader.read_into(0, 1, bytearray(5000))
    later.mark_verified(0)
    assert reader.life(0)[2] is SlotState.COMMITTED


def test_a_new_life_is_above_the_one_before_whatever_the_clock_says(tmp_path: Path) -> None:
    arena = opened(tmp_path / "a", incarnation=1000)
    reader = ArenaReader(arena.path)
    arena.leave()
    later, _ = Arena.open(arena.path, IDENTITY, 8, 5)
    assert later.layout.incarnation == 1001
    later.go_live([], Effects())
    assert not reader.live
    assert ArenaReader(arena.path).layout.incarnation == 1001


def test_another_model_is_refused_naming_both_and_reset_starts_empty(tmp_path: Path) -> None:
    arena = opened(tmp_path / "a")
    (digest,) = context("x", 1)
    put(arena, 0, digest)
    reader = ArenaReader(arena.path)
    arena.leave()
    other = ArenaIdentity(model="large", block_size=16, block_bytes=5000, key_version="sha256-u32-v1")
    with pytest.raises(
        ArenaError, match=r"holds blocks of tiny block_size=16 .*; this pool is for large block_size=16"
    ):
        Arena.open(arena.path, other, 8, 2)
    with pytest.raises(ArenaError, match="has 8 slots; this pool is to have 9"):
        Arena.open(arena.path, IDENTITY, 9, 2)
    later, found = Arena.open(arena.path, other, 8, 2, reset=True)
    assert found.blocks == []
    later.go_live([], Effects())
    assert not reader.live
    assert ArenaReader(arena.path).find(digest) is None


def test_only_one_pool_uses_an_arena(tmp_path: Path) -> None:
    arena = opened(tmp_path / "a")
    with pytest.raises(ArenaError, match="is in use by another pool"):
        Arena.open(arena.path, IDENTITY, 8, 2)
    with pytest.raises(ArenaError, match="is in use by another pool"):
        Arena.open(arena.path, IDENTITY, 8, 2, reset=True)
    arena.remove()
    assert not arena.path.exists()
    opened(arena.path)


def test_a_file_that_is_no_arena_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"something else" * 1000)
    with pytest.raises(ArenaError, match="no arena: the file starts with b'somethin'"):
        Arena.open(tmp_path / "a", IDENTITY, 8, 1)
    with pytest.raises(ArenaError, match="no arena"):
        ArenaReader(tmp_path / "a")


def test_an_arena_cut_short_is_refused(tmp_path: Path) -> None:
    arena = opened(tmp_path / "a")
    arena.leave()
    cut = tmp_path / "b"
    cut.write_bytes(arena.path.read_bytes()[:-4096])
    with pytest.raises(ArenaError, match=r"in .* bytes, this version lays it out as"):
        Arena.open(cut, IDENTITY, 8, 1)


def test_no_memory_for_an_arena_is_said_with_both_numbers() -> None:
    path = Path("/dev/shm/ei-test-too-large.arena")
    huge = ArenaIdentity(model="tiny", block_size=16, block_bytes=1 << 40, key_version="sha256-u32-v1")
    with pytest.raises(ArenaError, match=r"takes \d+ bytes, \d+ are free"):
        Arena.open(path, huge, 4, 1)
    assert not path.exists()
    assert not path.with_name(path.name + ".new").exists()


def test_a_mapping_outlives_the_reader_while_arrays_look_at_it(tmp_path: Path) -> None:
    arena = opened(tmp_path / "a")
    (digest,) = context("x", 1)
    put(arena, 0, digest)
    reader = ArenaReader(arena.path)
    view = reader.view(0)
    reader.close()
    arena.remove()
    assert np.array_equal(view[:5000], content(digest, 5000))
