"""Logs and metrics: one JSON object per line, one registry per app, nothing global."""

import logging
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TextIO

import msgspec
import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from structlog.typing import FilteringBoundLogger

from services.clock import Clock

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
LATENCY_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3, 6, 12, 25, 50, 100, 200, 400)
_MAX_KINDS = 1024
_METRIC = re.compile(r"[a-z][a-z0-9_]*_(total|seconds|bytes|tokens|blocks|ratio|count|info|timestamp_seconds)\Z")


def _as_json(entry: Any, **_: Any) -> str:
    return msgspec.json.encode(entry, enc_hook=repr, order="deterministic").decode()


def logger(service: str, *, level: str = "info", stream: TextIO | None = None, **fields: Any) -> FilteringBoundLogger:
    """A logger that writes JSON lines to `stream` (standard error), with `service` and `fields` in each.

    Fields bound with `bound` are merged in. `level`: debug, info, warning or error.
    """
    built: FilteringBoundLogger = structlog.wrap_logger(
        structlog.WriteLogger(stream or sys.stderr),
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.format_exc_info,
            structlog.processors.TimeStamper(fmt="iso", utc=True, key="t"),
            structlog.processors.JSONRenderer(serializer=_as_json),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        context_class=dict,
    )
    bound_logger: FilteringBoundLogger = built.bind(service=service, **fields)
    return bound_logger


def bound(**fields: Any) -> AbstractContextManager[None]:
    """Add fields (node, branch, request) to every log line of this task inside the `with`."""
    return structlog.contextvars.bound_contextvars(**fields)


class LibraryLogs(logging.Handler):
    """Sends what libraries log through `logging` to our own log, as event `library`."""

    def __init__(self, log: FilteringBoundLogger, level: int = logging.WARNING) -> None:
        super().__init__(level)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self._log.log(record.levelno, "library", logger=record.name, text=record.getMessage(), exc_info=error)


class RateLimitedLog:
    """Says the first of a kind at once, then at most one every `every_s` with how many were left out."""

    def __init__(self, log: FilteringBoundLogger, clock: Clock, every_s: float = 10.0) -> None:
        self._log, self._clock, self._every_s = log, clock, every_s
        self._kinds: dict[str, tuple[float, int]] = {}

    def warning(self, event: str, *, kind: str = "", **fields: Any) -> bool:
        """Log a warning unless `event` of this `kind` was logged within `every_s`; True if it was written."""
        key, now = f"{event} {kind}", self._clock.now()
        last, suppressed = self._kinds.get(key, (float("-inf"), 0))
        if now - last < self._every_s:
            self._kinds[key] = (last, suppressed + 1)
            return False
        if len(self._kinds) >= _MAX_KINDS:
            self._kinds = {k: (at, left) for k, (at, left) in self._kinds.items() if now - at < self._every_s}
        self._kinds[key] = (now, 0)
        if suppressed:
            fields["suppressed"] = suppressed
        self._log.warning(event, **fields)
        return True


class Metrics:
    """Makes the metrics of one service in one registry, named `ei_<service>_<thing>_<unit>`."""

    def __init__(self, service: str, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._prefix = f"ei_{service}_"

    def _name(self, name: str) -> str:
        if not _METRIC.match(name):
            raise ValueError(f"metric {name!r} does not end in a unit ({_METRIC.pattern})")
        return self._prefix + name

    def counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
        """A counter; `name` ends in `_total`."""
        return Counter(self._name(name), text, labels, registry=self.registry)

    def gauge(self, name: str, text: str, labels: Sequence[str] = (), read: Callable[[], float] | None = None) -> Gauge:
        """A gauge; `read`, when given, is called at each scrape."""
        gauge = Gauge(self._name(name), text, labels, registry=self.registry)
        if read is not None:
            gauge.set_function(read)
        return gauge

    def histogram(
        self, name: str, text: str, labels: Sequence[str] = (), buckets: Sequence[float] = LATENCY_BUCKETS_S
    ) -> Histogram:
        """A histogram, by default over latencies in seconds."""
        return Histogram(self._name(name), text, labels, buckets=buckets, registry=self.registry)


class ClockSkew:
    """Gauge `ei_<service>_clock_skew_seconds{node}`: how far a sender's clock is ahead of ours.

    It is all that a sender's `t` is used for; messages on the way make it negative by their travel time.
    """

    def __init__(self, metrics: Metrics, clock: Clock) -> None:
        self._clock = clock
        self._nodes: set[str] = set()
        self._gauge = metrics.gauge("clock_skew_seconds", "Clock of a node minus ours, at receipt", ["node"])

    def saw(self, node: str, t: float) -> None:
        """A message of `node` said that its clock shows `t` (Unix seconds)."""
        self._nodes.add(node)
        self._gauge.labels(node).set(t - self._clock.wall())

    def forget(self, node: str) -> None:
        """The node is gone."""
        if node in self._nodes:
            self._nodes.remove(node)
            self._gauge.remove(node)
