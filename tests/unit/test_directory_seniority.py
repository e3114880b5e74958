"""Which of several directories serves: the newest that is not blind, whatever is heard of whom and when."""

from hypothesis import given
from hypothesis import strategies as st

from services.directory.core.seniority import Seniority

TIMEOUT_S = 3.0


def test_a_newer_one_takes_the_place_once_it_sees_and_its_silence_gives_it_back() -> None:
    mine = Seniority(5, TIMEOUT_S)
    assert not mine.hear(4, 0.0, blind=False)
    assert not mine.hear(5, 0.0, blind=False), "its own words"
    assert not mine.hear(7, 0.0, blind=True)
    assert mine.newer is None
    assert mine.hear(7, 1.0, blind=False)
    assert not mine.hear(7, 2.0, blind=False), "it has stepped down already"
    assert not mine.due(4.9)
    assert mine.due(5.1)
    mine.hear(7, 5.2, blind=False)
    assert not mine.due(5.3)
    mine.hear(7, 5.3, blind=True)
    assert mine.due(5.3), "it said that it goes"
    mine.succeed(9)
    assert (mine.incarnation, mine.newer) == (9, None)


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(("beat", "silence")), st.booleans()), max_size=40))
def test_when_all_hear_each_other_one_serves(steps: list) -> None:
    all_of_them = [Seniority(number + 1, TIMEOUT_S) for number in range(4)]
    now, newest = 0.0, 4
    for who, what, blind in steps:
        now += 0.5
        if what == "silence":
            now += TIMEOUT_S + 1.0
        elif all_of_them[who].newer is None:
            for other in all_of_them:
                other.hear(all_of_them[who].incarnation, now, blind=blind)
        for each in all_of_them:
            if each.due(now):
                newest += 1
                each.succeed(newest)
            each.check()
    for _ in range(3):
        now += 0.5
        for each in [one for one in all_of_them if one.newer is None]:
            if each.newer is None:
                for other in all_of_them:
                    other.hear(each.incarnation, now, blind=False)
    assert sum(each.newer is None for each in all_of_them) == 1
