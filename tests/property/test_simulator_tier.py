"""A tier against a naive one: which blocks are here, how far a context reaches, and that eviction is suffix first."""

from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from services.simulator.tier import Gone, Tier

BLOCKS = 40
CONTEXTS = [
    array("Q", [*range(1, 61)]),
    array("Q", [*range(1, 21), *range(101, 131)]),
    array("Q", [*range(1, 21), *range(101, 106), *range(201, 221)]),
    array("Q", [*range(301, 331)]),
]
Step = tuple[str, int, int, int]

steps = st.lists(
    st.tuples(
        st.sampled_from(["write", "touch", "refer", "unrefer"]),
        st.integers(0, len(CONTEXTS) - 1),
        st.integers(0, 59),
        st.integers(1, 25),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(steps)
def test_what_is_here(script: list[Step]) -> None:
    here: set[int] = set()

    def evicted(gone: Gone) -> None:
        for key in range(gone.first, gone.first + gone.blocks):
            here.remove(key)

    tier = Tier(BLOCKS, evicted)
    for now, (what, number, first, length) in enumerate(script):
        keys = CONTEXTS[number]
        first = min(first, len(keys) - 1)
        last = min(len(keys), first + length)
        if what == "write":
            for start, end in tier.write(keys, first, last, float(now)):
                assert first <= start < end <= last
                assert not here & set(keys[start:end])
                here |= set(keys[start:end])
        elif what == "touch":
            tier.unhold(tier.hold(keys, last, float(now)))
        else:
            tier.refer([(key, 1) for key in keys[first:last]], referenced=what == "refer", unreachable=False)
        tier.check()
        assert tier.used_blocks == len(here) <= BLOCKS
        for context in CONTEXTS:
            for start in range(0, len(context), 7):
                run = start
                while run < len(context) and context[run] in here:
                    run += 1
                assert tier.reach(context, start, len(context)) == run


@settings(max_examples=60, deadline=None)
@given(steps)
def test_what_is_held_stays(script: list[Step]) -> None:
    tier = Tier(BLOCKS)
    kept = CONTEXTS[3]
    tier.write(kept, 0, 12, 0.0)
    slot = tier.hold(kept, 12, 0.0)
    for now, (_, number, first, length) in enumerate(script):
        keys = CONTEXTS[number]
        first = min(first, len(keys) - 1)
        tier.write(keys, first, min(len(keys), first + length), float(now))
        assert tier.reach(kept, 0, 12) == 12
    tier.unhold(slot)
    tier.check()


def test_unreferenced_goes_first_then_the_oldest() -> None:
    gone: list[int] = []
    tier = Tier(30, lambda piece: gone.append(piece.first))
    for number, (first, blocks) in enumerate(((1, 10), (101, 10), (301, 10))):
        keys = array("Q", range(first, first + blocks))
        tier.write(keys, 0, blocks, float(number))
    tier.refer([(1, 10)], referenced=True, unreachable=False)
    tier.write(array("Q", range(501, 511)), 0, 10, 5.0)
    assert gone == [101]
    tier.write(array("Q", range(601, 621)), 0, 20, 6.0)
    assert gone == [101, 301, 501]
