"""The table of all channels: subject, messages, delivery. What AsyncAPI and the protocol page are made from."""

from enum import StrEnum
from typing import NamedTuple

from schemas import branch, directory, iteration_model, kv, phase, pool, serve, telemetry
from schemas.codec import Message


class Delivery(StrEnum):
    """How a channel carries its messages."""

    CORE = "core"
    STREAM = "stream"
    REQUEST = "request"


class Channel(NamedTuple):
    """One subject with its `{parameters}`; `reply` is set for questions and their answers only."""

    name: str
    address: str
    delivery: Delivery
    message: type[Message] | None
    text: str
    reply: type[Message] | None = None

    @property
    def parameters(self) -> list[str]:
        """The names in braces, in order."""
        return [part[1:-1] for part in self.address.split(".") if part.startswith("{")]


PARAMETERS = {
    "partition": "Independent part of a cluster; p0 by default",
    "shard": "First two hex digits of the sha256 of the branch id, after the mark of its tenant (none for the default)",
    "node": "Name of a node, [a-z0-9-]",
    "router": "Name of a router, [a-z0-9-]",
    "directory": "Name of a directory, [a-z0-9-]",
}


def _core(name: str, path: str, message: type[Message] | None, text: str) -> Channel:
    return Channel(name, f"ei.{{partition}}.{path}", Delivery.CORE, message, text)


def _stream(name: str, path: str, message: type[Message], text: str) -> Channel:
    return Channel(name, f"ei.{{partition}}.{path}", Delivery.STREAM, message, text)


def _ask(name: str, path: str, message: type[Message], reply: type[Message], text: str) -> Channel:
    return Channel(name, f"ei.{{partition}}.{path}", Delivery.REQUEST, message, text, reply)


CHANNELS: list[Channel] = [
    _stream(
        "branchEvent",
        "branch.event.{shard}",
        branch.BranchEvent,
        "Life of a branch. JSON is accepted with the header content-type: application/json; Nats-Msg-Id deduplicates.",
    ),
    _core(
        "telemetryIteration",
        "telemetry.iteration.{node}",
        telemetry.IterationBatch,
        "Iterations of an engine, batched for at most 100 ms.",
    ),
    _core(
        "telemetryNode",
        "telemetry.node.{node}",
        telemetry.NodeTelemetry,
        "Heartbeat of a node, every second and at once after a change of phase.",
    ),
    _core("telemetryRequest", "telemetry.request.{node}", telemetry.RequestTelemetry, "One finished request."),
    _core(
        "telemetryRouter",
        "telemetry.router.{router}",
        telemetry.RouterTelemetry,
        "Heartbeat of a router, every second; engines cancel requests of one that is silent, directories forget them.",
    ),
    _core(
        "telemetryDirectory",
        "telemetry.directory.{directory}",
        telemetry.DirectoryTelemetry,
        "Heartbeat of a directory, every second; of several the newest that is not blind serves.",
    ),
    _stream(
        "phaseCommand",
        "phase.command.{node}",
        phase.PhaseCommand,
        "The planner's order to a node; the last of each node is kept.",
    ),
    _core("phaseState", "phase.state.{node}", phase.PhaseState, "How far a node is with its change of phase."),
    _stream("plannerDecision", "planner.decision", phase.Decision, "Every decision with the numbers behind it."),
    _core(
        "plannerModels",
        "planner.models",
        iteration_model.PlannerModels,
        "Iteration-time models of all nodes as learned online, every 5 s; the latest stands.",
    ),
    *[
        _ask(f"queryPlanner{verb.title()}", f"query.planner.{verb}", phase.PlannerQuery, phase.PlannerReply, text)
        for verb, text in {
            "split": "Order a split; answered when the switch has ended.",
            "phase": "Order the phase of one node; answered when the switch has ended.",
            "pin": "Keep a node in its phase, or let it go.",
            "mode": "on, off or dry-run.",
            "status": "What the planner does now.",
        }.items()
    ],
    _ask(
        "queryDirectoryMatch",
        "query.directory.match",
        directory.MatchQuery,
        directory.MatchReply,
        "Where the longest cached prefix lies; asked with a budget of 20 ms.",
    ),
    _ask("queryDirectoryBranch", "query.directory.branch", directory.BranchQuery, directory.BranchReply, "One branch."),
    _ask(
        "queryDirectoryBranches",
        "query.directory.branches",
        directory.BranchQuery,
        directory.BranchReply,
        "All branches, newest first.",
    ),
    _ask(
        "queryDirectoryReferences",
        "query.directory.references",
        directory.ReferencesQuery,
        directory.StatsReply,
        "A pool that starts asks which of its copies are referenced; the references come as a full kv.reference.",
    ),
    _ask(
        "queryDirectoryStats",
        "query.directory.stats",
        pool.Empty,
        directory.StatsReply,
        "Totals of the directory.",
    ),
    _core(
        "kvLocation",
        "kv.location.{node}",
        kv.KvLocation,
        "What came to, left or moved within a node, ordered by (incarnation, seq); without changes it is a heartbeat.",
    ),
    _ask("kvSnapshot", "kv.snapshot.{node}", kv.SnapshotRequest, kv.SnapshotPart, "Everything a node holds, in parts."),
    _core("kvReference", "kv.reference.{node}", kv.KvReference, "Which copies of a node active branches reference."),
    _core("nodeHello", "node.hello.{node}", kv.NodeHello, "What a node is; at its start and when asked."),
    _core("nodeWho", "node.who", None, "A late joiner asks every node to say hello again; no payload."),
    _ask(
        "serve",
        "serve.{node}",
        serve.ServeRequest,
        serve.ServeReply,
        "Router to engine: take one leg of a request. Idempotent by id, attempt and phase.",
    ),
    _core(
        "reply",
        "reply.{router}",
        serve.ReplyBatch,
        "Engine to router: the news of all its requests after one iteration.",
    ),
    _ask("resend", "resend.{node}", serve.ResendRequest, serve.ReplyBatch, "Tokens of a request again, from an index."),
    _ask("cancel", "cancel.{node}", serve.CancelRequest, serve.CancelReply, "End every leg of an attempt on a node."),
    _ask(
        "handoff",
        "handoff.{node}",
        serve.Handoff,
        serve.HandoffReply,
        "Between the two engines of a request: reserve, done, abort.",
    ),
    _ask(
        "prompt",
        "prompt.{router}",
        serve.PromptRequest,
        serve.PromptPart,
        "Read a prompt that is too large for one message.",
    ),
    _ask("poolLease", "pool.lease.{node}", pool.LeaseRequest, pool.LeaseReply, "Hold blocks so that they can be read."),
    _ask("poolRelease", "pool.release.{node}", pool.ReleaseRequest, pool.Empty, "End a lease or a pin."),
    _ask("poolLocate", "pool.locate.{node}", pool.LocateRequest, pool.LocateReply, "How many leading blocks are here."),
    _ask("poolFetch", "pool.fetch.{node}", pool.FetchRequest, pool.FetchReply, "Bring blocks here and pin them."),
    _ask("poolStore", "pool.store.{node}", pool.FetchRequest, pool.FetchReply, "Bring blocks here to keep."),
]
