"""Blocks with media: equal keys are not enough, the sha256 of every medium is compared."""

import hashlib

import pytest
from directory_bench import B, Bench, pack

from schemas.directory import MatchReply
from schemas.kv import BlockMedia, ChangeType, LocationChange, Tier
from services.directory.core.directory import Directory, DirectoryConfig
from tests.directory_checkpoint import put_back, taken

CAT, DOG = (hashlib.sha256(name).digest() for name in (b"cat", b"dog"))


def shown(*media: bytes, block: int = 3) -> LocationChange:
    """B with these media in one block."""
    marks = [BlockMedia(block, b"".join(media))]
    return LocationChange(type=ChangeType.STORED, tier=Tier.L2, hashes=pack(B), media=marks)


def asked(bench: Bench, *media: bytes, block: int = 3) -> MatchReply:
    return bench.match(B, media=[BlockMedia(block, b"".join(media))])


@pytest.fixture
def bench() -> Bench:
    bench = Bench()
    bench.say("p1", 1, shown(CAT))
    return bench


def test_the_same_picture_matches_and_another_one_of_equal_key_ends_the_prefix(bench: Bench) -> None:
    assert asked(bench, CAT).blocks == 8
    reply = asked(bench, DOG)
    assert (reply.blocks, reply.known_blocks) == (3, 3)
    assert [(match.node, match.l2_blocks) for match in reply.nodes] == [("p1", 3)]
    assert asked(bench, CAT, DOG).blocks == 3, "all media of a block count, in order"


def test_another_picture_of_equal_key_is_not_held(bench: Bench) -> None:
    bench.say("p2", 1, shown(DOG))
    assert bench.held("p2") == 3
    assert bench.core.counters.conflicting_media == 1
    assert [match.l2_blocks for match in asked(bench, CAT).nodes] == [8, 3]


def test_a_copy_that_does_not_say_what_it_shows_matches_no_picture() -> None:
    bench = Bench()
    bench.say("p1", 1, LocationChange(type=ChangeType.STORED, tier=Tier.L2, hashes=pack(B)))
    assert asked(bench, CAT).blocks == 3
    bench.say("p2", 1, shown(CAT))
    assert bench.held("p2") == 3, "nor is it said to be the same"


def test_a_context_may_be_known_before_its_copies() -> None:
    bench = Bench()
    bench.answered("a", B)
    bench.say("p1", 1, shown(CAT))
    assert (asked(bench, CAT).blocks, asked(bench, DOG).blocks) == (8, 3)


def test_media_outlive_a_restart_and_are_forgotten_with_their_blocks(bench: Bench) -> None:
    core = Directory(DirectoryConfig(), incarnation=2)
    put_back(core, taken(bench.core))
    assert core.tree.media.of == {B[3]: CAT}
    while core.tree.forget(0):
        pass
    assert core.tree.media.of == {}
