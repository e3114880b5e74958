"""The JetStream streams of a partition: what is durable, for how long, and under which subjects."""

from typing import NamedTuple

from schemas.subjects import Subjects

DAY_S = 86_400.0
BRANCH_KEPT_S = 7 * DAY_S
DECISION_KEPT_S = 30 * DAY_S


class Stream(NamedTuple):
    """One stream as `Bus.ensure_stream` takes it; `max_age_s` None keeps messages for ever."""

    name: str
    subjects: list[str]
    max_age_s: float | None = None
    last_per_subject: bool = False


def branch_stream(subjects: Subjects) -> Stream:
    """Branch events: what a directory that lost its state rebuilds every claim from."""
    return Stream(f"ei_{subjects.partition}_branch", [subjects.branch_events()], BRANCH_KEPT_S)


def phase_stream(subjects: Subjects) -> Stream:
    """Phase commands: only the newest of each node, for as long as there is none newer."""
    return Stream(f"ei_{subjects.partition}_phase", [subjects.phase_command(subjects.ANY)], last_per_subject=True)


def planner_stream(subjects: Subjects) -> Stream:
    """Planner decisions: what the planner continues from and `ei explain` reads."""
    return Stream(f"ei_{subjects.partition}_planner", [subjects.planner_decision()], DECISION_KEPT_S)


def all_streams(subjects: Subjects) -> list[Stream]:
    return [branch_stream(subjects), phase_stream(subjects), planner_stream(subjects)]
