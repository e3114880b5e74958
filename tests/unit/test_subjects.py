"""Subjects: built and parsed in one place, nothing hostile gets in."""

import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.subjects import DIRECT_TOPICS, Subjects, branch_shard, checked_name, parse
from services.bus.subjects import matches

names = st.from_regex(r"[a-z0-9-]{1,63}", fullmatch=True)
SUBJECTS = Subjects("p0")


def built(name: str) -> dict[str, str]:
    """Every subject of a partition, with `name` wherever one is taken."""
    made = {}
    for method, function in inspect.getmembers(SUBJECTS, inspect.ismethod):
        if method.startswith("_"):
            continue
        arguments = ["x"] * len(inspect.signature(function).parameters)
        made[method] = function(*[name for _ in arguments])
    return made


@given(names)
def test_every_subject_parses_back(name: str) -> None:
    for method, subject in built(name).items():
        parsed = parse(subject)
        assert parsed.partition == "p0", method
        topic_and_event = [parsed.topic, *([parsed.event] if parsed.event else [])]
        rebuilt = ["ei", parsed.partition, *topic_and_event, *([parsed.entity] if parsed.entity else [])]
        assert ".".join(rebuilt) == subject, method


def test_no_two_subjects_are_the_same() -> None:
    subjects = built("a").values()
    assert len(set(subjects)) == len(subjects)


@pytest.mark.parametrize(
    ("subject", "expected"),
    [
        (SUBJECTS.telemetry_node("node-0"), "ei.p0.telemetry.node.node-0"),
        (SUBJECTS.telemetry_iteration("node-0"), "ei.p0.telemetry.iteration.node-0"),
        (SUBJECTS.telemetry_request("node-0"), "ei.p0.telemetry.request.node-0"),
        (SUBJECTS.telemetry_router("r0"), "ei.p0.telemetry.router.r0"),
        (SUBJECTS.phase_command("node-0"), "ei.p0.phase.command.node-0"),
        (SUBJECTS.phase_state("node-0"), "ei.p0.phase.state.node-0"),
        (SUBJECTS.planner_decision(), "ei.p0.planner.decision"),
        (SUBJECTS.query_planner("split"), "ei.p0.query.planner.split"),
        (SUBJECTS.query_directory("match"), "ei.p0.query.directory.match"),
        (SUBJECTS.kv_location("node-0"), "ei.p0.kv.location.node-0"),
        (SUBJECTS.kv_snapshot("node-0"), "ei.p0.kv.snapshot.node-0"),
        (SUBJECTS.node_hello("node-0"), "ei.p0.node.hello.node-0"),
        (SUBJECTS.serve("node-0"), "ei.p0.serve.node-0"),
        (SUBJECTS.reply("r0"), "ei.p0.reply.r0"),
        (SUBJECTS.cancel("node-0"), "ei.p0.cancel.node-0"),
        (SUBJECTS.pool("lease", "node-0"), "ei.p0.pool.lease.node-0"),
        (SUBJECTS.branch_events(), "ei.p0.branch.event.*"),
        (Subjects("p7").serve(Subjects.ANY), "ei.p7.serve.*"),
    ],
)
def test_the_names_of_the_contract(subject: str, expected: str) -> None:
    assert subject == expected


@given(st.text(), st.text())
def test_tenants_have_subjects_of_their_own(one: str, other: str) -> None:
    if one != other:
        assert SUBJECTS.branch_event("b", one) != SUBJECTS.branch_event("b", other)
    assert matches(SUBJECTS.branch_events(), SUBJECTS.branch_event("b", one))


@given(st.text())
def test_a_branch_id_never_reaches_the_subject(branch: str) -> None:
    subject = SUBJECTS.branch_event(branch)
    assert len(subject) == len("ei.p0.branch.event.00")
    assert subject.rsplit(".", 1)[1] == branch_shard(branch)
    assert parse(subject).event == "event"


@given(st.text())
def test_names_are_checked(name: str) -> None:
    allowed = set("abcdefghijklmnopqrstuvwxyz0123456789-")
    if 0 < len(name) <= 63 and set(name) <= allowed:
        assert checked_name(name) == name
    else:
        with pytest.raises(ValueError, match="does not match"):
            checked_name(name)


@pytest.mark.parametrize("hostile", ["", "a.b", "a b", "*", ">", "a\r\nPUB x 0", "é", "A", "a" * 64, "a\n"])
def test_hostile_names_are_refused(hostile: str) -> None:
    for build in (SUBJECTS.serve, SUBJECTS.kv_location, SUBJECTS.query_planner, Subjects):
        if hostile == "*" and build is not Subjects:
            continue
        with pytest.raises(ValueError, match="does not match"):
            build(hostile)


@pytest.mark.parametrize(
    "subject", ["", "ei", "ei.p0.serve", "ei.p0.serve.a.b", "ei..a.b", "x.p0.kv.location.a", "ei.p0.a.b.c.d"]
)
def test_foreign_subjects_are_refused(subject: str) -> None:
    with pytest.raises(ValueError, match="is not ei"):
        parse(subject)


@given(st.text(alphabet="eip0.*>abc- ", max_size=30))
def test_parsing_anything_gives_parts_or_a_value_error(text: str) -> None:
    try:
        parsed = parse(text)
    except ValueError:
        return
    assert all(part for part in (parsed.partition, parsed.topic))
    assert (parsed.event == "") == (parsed.topic in DIRECT_TOPICS)
