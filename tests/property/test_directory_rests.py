"""What nobody claims any more: pieces and rates against a naive count of single blocks."""

from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from services.directory.core.branch import Branch
from services.directory.core.rests import LEAN, WATCHED_S, How, RestKind, Rests
from services.directory.core.run import Run, keys_view

START = 3
BLOCKS = 24


class Naive:
    """Every block for itself."""

    def __init__(self) -> None:
        self.resting: dict[int, tuple[RestKind, float, float]] = {}
        self.returned: dict[RestKind, float] = defaultdict(float)
        self.seconds: dict[RestKind, float] = defaultdict(float)

    def close(self, block: int, now: float, *, back: bool) -> None:
        kind, weight, since = self.resting.pop(block)
        self.seconds[kind] += weight * min(now - since, WATCHED_S)
        if back and now - since < WATCHED_S:
            self.returned[kind] += weight

    def rates(self, now: float) -> dict[RestKind, float]:
        seconds = dict(self.seconds)
        for kind, weight, since in self.resting.values():
            seconds[kind] = seconds.get(kind, 0.0) + weight * min(now - since, WATCHED_S)
        usual = (sum(self.returned.values()) + 1.0) / (sum(seconds.values()) + WATCHED_S)
        watched = LEAN * WATCHED_S
        return {k: (self.returned[k] + usual * 2.0**k.others * watched) / (s + watched) for k, s in seconds.items()}


steps = st.lists(
    st.tuples(
        st.sampled_from("abc"),
        st.integers(0, BLOCKS),
        st.sampled_from(list(How)),
        st.lists(st.integers(1, BLOCKS), max_size=4),
        st.floats(0.0, 400.0),
    ),
    max_size=30,
)


@settings(deadline=None)
@given(steps)
def test_pieces_and_rates_are_those_of_single_blocks(steps: list[tuple[str, int, How, list[int], float]]) -> None:
    rests, naive = Rests(), Naive()
    run = Run(0, None, 0, keys_view(b"".join(i.to_bytes(8, "little") for i in range(BLOCKS))))
    branches: dict[str, Branch] = {name: Branch(("", name), 0.0) for name in "abc"}
    now, claimed = 0.0, 0
    for name, end, how, passed, wait_s in steps:
        now += wait_s
        rests.tick(now)
        if end >= claimed:
            rests.claimed(run, end, now)
            for block in [block for block in naive.resting if block < end]:
                naive.close(block, now, back=True)
        else:
            for rest in rests.let_go(branches[name], run, end, claimed, START, passed, how, now):
                for block in range(rest.first, rest.last):
                    others = sum(reached > block for reached in passed).bit_length()
                    assert rest.kind == (how, others, ((START + block + 1) ** 2).bit_length() - 1)
                    assert rest.kind.depth <= START + block
                    naive.resting[block] = (rest.kind, 1.0 / rest.size, now)
        claimed = end
        rests.check()
        assert sorted(b for stack in rests.runs() for r in stack for b in range(r.first, r.last)) == sorted(
            naive.resting
        )
    rests.refit(now)
    for kind, rate in naive.rates(now).items():
        assert abs(rests.rate(kind) - rate) < 1e-9 + 1e-6 * rate


def test_what_a_branch_left_becomes_that_of_an_ended_one_unless_it_was_claimed_meanwhile() -> None:
    rests, branch = Rests(), Branch(("", "a"), 0.0)
    run = Run(0, None, 0, keys_view(bytes(8 * BLOCKS)))
    rests.let_go(branch, run, 4, BLOCKS, 0, [], How.LEFT, 1.0)
    rests.claimed(run, 10, 2.0)
    ended = rests.ended(branch, 3.0)
    assert {rest.kind.how for rest in ended} == {How.ENDED}
    assert sorted(block for rest in ended for block in range(rest.first, rest.last)) == list(range(10, BLOCKS))
    assert rests.ended(branch, 4.0) == []
    rests.check()
