"""Logs and metrics: what they look like, and that they leave nothing behind."""

import io
import json
import logging

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from services.observe import ClockSkew, LibraryLogs, Metrics, RateLimitedLog, bound, logger


class ManualClock:
    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def wall(self) -> float:
        return self.time


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_is_one_json_object_with_bound_fields() -> None:
    stream = io.StringIO()
    log = logger("router", stream=stream, name="r0")
    with bound(request="q1", branch="b1"):
        log.info("placed", node="node-0", tokens=3)
    log.debug("unheard")
    log.warning("odd", value={1, 2}.__class__, data=b"\xff")
    first, second = lines(stream)
    assert first["event"] == "placed"
    assert (first["service"], first["name"], first["level"]) == ("router", "r0", "info")
    assert (first["request"], first["branch"], first["node"], first["tokens"]) == ("q1", "b1", "node-0", 3)
    assert str(first["t"]).endswith("Z")
    assert "request" not in second


def test_exceptions_are_written_with_their_trace() -> None:
    stream = io.StringIO()
    log = logger("router", stream=stream)
    try:
        raise ValueError("5 exceeds 3")
    except ValueError as error:
        log.error("failed", exc_info=error)
    (line,) = lines(stream)
    assert "ValueError: 5 exceeds 3" in str(line["exception"])


def test_the_level_is_respected() -> None:
    stream = io.StringIO()
    log = logger("router", level="error", stream=stream)
    log.warning("no")
    log.error("yes")
    assert [line["event"] for line in lines(stream)] == ["yes"]


def test_two_loggers_do_not_mix() -> None:
    one, two = io.StringIO(), io.StringIO()
    logger("a", stream=one).info("x")
    logger("b", stream=two).info("y")
    assert [line["service"] for line in lines(one)] == ["a"]
    assert [line["service"] for line in lines(two)] == ["b"]


def test_a_rate_limited_log_counts_what_it_leaves_out() -> None:
    stream, clock = io.StringIO(), ManualClock()
    limited = RateLimitedLog(logger("router", stream=stream), clock, every_s=10)
    assert limited.warning("rejected", kind="version", text="first")
    assert not limited.warning("rejected", kind="version", text="second")
    assert limited.warning("rejected", kind="schema", text="other kind")
    clock.time = 9.9
    assert not limited.warning("rejected", kind="version", text="third")
    clock.time = 10.0
    assert limited.warning("rejected", kind="version", text="fourth")
    assert [(line["text"], line.get("suppressed")) for line in lines(stream)] == [
        ("first", None),
        ("other kind", None),
        ("fourth", 2),
    ]


def test_a_rate_limited_log_forgets_old_kinds() -> None:
    clock = ManualClock()
    limited = RateLimitedLog(logger("router", stream=io.StringIO()), clock, every_s=10)
    for number in range(5000):
        clock.time += 0.1
        limited.warning("rejected", kind=str(number))
    assert len(limited._kinds) <= 1024


def test_library_logs_come_as_ours() -> None:
    stream = io.StringIO()
    handler = LibraryLogs(logger("router", stream=stream))
    library = logging.getLogger("test.library")
    library.addHandler(handler)
    library.propagate = False
    try:
        library.warning("odd %s", "thing")
        library.info("quiet")
    finally:
        library.removeHandler(handler)
    (line,) = lines(stream)
    assert (line["event"], line["logger"], line["text"]) == ("library", "test.library", "odd thing")


def test_metrics_are_named_after_service_thing_and_unit() -> None:
    registry = CollectorRegistry()
    metrics = Metrics("router", registry)
    metrics.counter("requests_total", "Requests", ["outcome"]).labels("ok").inc()
    metrics.gauge("open_requests_count", "Open", read=lambda: 3.0)
    metrics.histogram("ttft_seconds", "Time to first token").observe(0.3)
    text = generate_latest(registry).decode()
    assert 'ei_router_requests_total{outcome="ok"} 1.0' in text
    assert "ei_router_open_requests_count 3.0" in text
    assert 'ei_router_ttft_seconds_bucket{le="0.4"} 1.0' in text
    for bad in ("requests", "Requests_total", "ttft_ms"):
        with pytest.raises(ValueError, match="unit"):
            metrics.counter(bad, "")


def test_case_93_skew_is_a_gauge_per_node() -> None:
    registry, clock = CollectorRegistry(), ManualClock()
    clock.time = 1000.0
    skew = ClockSkew(Metrics("planner", registry), clock)
    for node, t in (("n1", 999.5), ("n2", 1000.0), ("n3", 1600.0)):
        skew.saw(node, t)
    text = generate_latest(registry).decode()
    assert 'ei_planner_clock_skew_seconds{node="n1"} -0.5' in text
    assert 'ei_planner_clock_skew_seconds{node="n2"} 0.0' in text
    assert 'ei_planner_clock_skew_seconds{node="n3"} 600.0' in text
    skew.forget("n3")
    skew.forget("never-seen")
    assert 'node="n3"' not in generate_latest(registry).decode()


def test_registries_are_apart() -> None:
    for _ in range(2):
        Metrics("router", CollectorRegistry()).counter("requests_total", "Requests")
