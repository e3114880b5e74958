"""Every NATS subject: `ei.<partition>.<topic>.<event>[.<entity>]`, built and parsed in this one place.

Ids of branches and requests never stand in a subject; node and router names match `NAME`.
"""

import hashlib
import re
from typing import NamedTuple

NAME = re.compile(r"[a-z0-9-]{1,63}\Z")
DEFAULT_PARTITION = "p0"
DIRECT_TOPICS = frozenset({"serve", "reply", "cancel", "handoff", "resend", "prompt"})


class Subject(NamedTuple):
    """A parsed subject; `entity` is None where the subject has none."""

    partition: str
    topic: str
    event: str
    entity: str | None


def checked_name(name: str) -> str:
    """Return `name` if it may stand in a subject; ValueError names it otherwise."""
    if not NAME.match(name):
        raise ValueError(f"name {name!r} does not match [a-z0-9-]{{1,63}}")
    return name


def parse(subject: str) -> Subject:
    """Split a subject into its parts; ValueError if it is not one of ours.

    In `serve`, `reply`, `cancel`, `handoff`, `resend` and `prompt`, `event` is "" and `entity` the node or router.
    """
    parts = subject.split(".")
    if len(parts) not in (4, 5) or parts[0] != "ei" or not all(parts):
        raise ValueError(f"subject {subject!r} is not ei.<partition>.<topic>.<event>[.<entity>]")
    if parts[2] in DIRECT_TOPICS:
        if len(parts) != 4:
            raise ValueError(f"subject {subject!r} is not ei.<partition>.{parts[2]}.<entity>")
        return Subject(parts[1], parts[2], "", parts[3])
    return Subject(parts[1], parts[2], parts[3], parts[4] if len(parts) == 5 else None)


SHARDS = [f"{number:02x}" for number in range(256)]


def tenant_mark(tenant: str) -> str:
    """What the shards of a tenant begin with, so that the broker can tell tenants apart; "" for the default one."""
    return hashlib.sha256(tenant.encode()).hexdigest()[:16] + "-" if tenant else ""


def branch_shard(branch: str, tenant: str = "") -> str:
    """The token under which all events of one branch travel, in order: its tenant's mark and two hex digits."""
    return tenant_mark(tenant) + hashlib.sha256(branch.encode()).hexdigest()[:2]


class Subjects:
    """The subjects of one partition. `ANY` as an entity gives the pattern for all of them."""

    ANY = "*"

    def __init__(self, partition: str = DEFAULT_PARTITION) -> None:
        self.partition = checked_name(partition)
        self.prefix = f"ei.{self.partition}"

    def _of(self, path: str, entity: str) -> str:
        return f"{self.prefix}.{path}.{entity if entity == self.ANY else checked_name(entity)}"

    def branch_event(self, branch: str, tenant: str = "") -> str:
        return f"{self.prefix}.branch.event.{branch_shard(branch, tenant)}"

    def branch_events(self) -> str:
        return f"{self.prefix}.branch.event.*"

    def telemetry_iteration(self, node: str) -> str:
        return self._of("telemetry.iteration", node)

    def telemetry_node(self, node: str) -> str:
        return self._of("telemetry.node", node)

    def telemetry_request(self, node: str) -> str:
        return self._of("telemetry.request", node)

    def telemetry_router(self, router: str) -> str:
        return self._of("telemetry.router", router)

    def telemetry_directory(self, directory: str) -> str:
        return self._of("telemetry.directory", directory)

    def phase_command(self, node: str) -> str:
        return self._of("phase.command", node)

    def phase_state(self, node: str) -> str:
        return self._of("phase.state", node)

    def planner_decision(self) -> str:
        return f"{self.prefix}.planner.decision"

    def planner_models(self) -> str:
        """The iteration-time models the planner learned, for routers."""
        return f"{self.prefix}.planner.models"

    def query_planner(self, verb: str) -> str:
        """Verbs: split, phase, pin, mode, status."""
        return self._of("query.planner", verb)

    def query_directory(self, verb: str) -> str:
        """Verbs: match, branch, branches, references, stats."""
        return self._of("query.directory", verb)

    def kv_location(self, node: str) -> str:
        return self._of("kv.location", node)

    def kv_snapshot(self, node: str) -> str:
        return self._of("kv.snapshot", node)

    def kv_reference(self, node: str) -> str:
        return self._of("kv.reference", node)

    def node_hello(self, node: str) -> str:
        return self._of("node.hello", node)

    def node_hello_query(self) -> str:
        """Published by a late joiner: every node answers by publishing its hello again."""
        return f"{self.prefix}.node.who"

    def serve(self, node: str) -> str:
        return self._of("serve", node)

    def handoff(self, node: str) -> str:
        """From the engine that prefills to the engine that will decode: reserve, done, abort."""
        return self._of("handoff", node)

    def cancel(self, node: str) -> str:
        return self._of("cancel", node)

    def reply(self, router: str) -> str:
        return self._of("reply", router)

    def resend(self, node: str) -> str:
        """A router that saw a gap in a request's tokens asks its engine for them again."""
        return self._of("resend", node)

    def prompt(self, router: str) -> str:
        """Engines read prompts too large for one message from the router, in chunks."""
        return self._of("prompt", router)

    def pool(self, verb: str, node: str) -> str:
        """Verbs: lease, release, locate, fetch, store."""
        return self._of(f"pool.{checked_name(verb)}", node)
