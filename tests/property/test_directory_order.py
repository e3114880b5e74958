"""In whatever order the signals of branches come, the same branches are left."""

from hypothesis import given
from hypothesis import strategies as st

from schemas.branch import BranchEvent, BranchEventType, BranchState
from services.directory.core.directory import Directory, DirectoryConfig

BRANCHES = "abcdef"
OPENINGS = (BranchEventType.OPEN, BranchEventType.FORK, BranchEventType.SUBAGENT)


def event(branch: str, type_: BranchEventType, parent: str | None = None) -> BranchEvent:
    return BranchEvent(id=f"{type_} {branch}", t=0.0, branch=branch, type=type_, parent=parent)


def left(events: list[BranchEvent]) -> set[str]:
    """Which branches are active after these."""
    directory = Directory(DirectoryConfig(), 1)
    for each in events:
        directory.on_branch_event(each, 0.0)
    directory.check()
    while directory.has_work:
        directory.work(1)
    directory.check()
    return {branch.key[1] for branch in directory.branches.newest_first() if branch.state is BranchState.ACTIVE}


@st.composite
def families(draw: st.DrawFn) -> list[BranchEvent]:
    """Each branch opened, all but the first by one before it, some first without a word on that; and some ends."""
    events = [event("a", BranchEventType.OPEN)]
    for number, branch in enumerate(BRANCHES[1:], 1):
        parent = draw(st.sampled_from(BRANCHES[:number]))
        events.append(event(branch, draw(st.sampled_from(OPENINGS[1:])), parent))
        if draw(st.booleans()):
            events.append(event(branch, BranchEventType.OPEN))
    return events + [event(branch, BranchEventType.END) for branch in draw(st.sets(st.sampled_from(BRANCHES)))]


@given(families().flatmap(lambda events: st.tuples(st.just(events), st.permutations(events))))
def test_order_does_not_decide_who_is_left(both: tuple[list[BranchEvent], list[BranchEvent]]) -> None:
    sent, came = both
    assert left(came) == left(sent)


def test_a_branch_outlives_a_parent_that_ended_alone_in_either_order() -> None:
    end = BranchEvent(id="end", t=0.0, branch="a", type=BranchEventType.END, cascade=False)
    fork = event("b", BranchEventType.FORK, "a")
    assert left([fork, end]) == left([end, fork]) == {"b"}
