"""Who may say and hear what: the broker's permissions of each role, derived from the subjects of the contract."""

from enum import StrEnum
from typing import NamedTuple

from schemas.streams import Stream, branch_stream, phase_stream, planner_stream
from schemas.subjects import SHARDS, Subjects


class Role(StrEnum):
    """The kinds of client. `operator` is the command line, `harness` a gateway or hook with a key."""

    ROUTER = "router"
    PLANNER = "planner"
    DIRECTORY = "directory"
    ENGINE = "engine"
    KVPOOL = "kvpool"
    HARNESS = "harness"
    OPERATOR = "operator"
    ANONYMOUS = "anonymous"


class Grant(NamedTuple):
    """Subjects (with wildcards) a client may publish and subscribe to; `responds`: it may answer requests it got.

    `unheard` is never delivered, whatever it subscribed to: the broker takes the `>` of a subscription for a token, so
    that `_INBOX.*` alone would let `_INBOX.>` through.
    """

    publish: list[str]
    subscribe: list[str]
    responds: bool
    unheard: list[str] = []


def inbox(role: Role) -> str:
    """The prefix of the subjects on which a role's replies come in; a level deeper than what others may hear."""
    return f"_INBOX.{role}"


def stream_use(stream: Stream) -> list[str]:
    """What a client publishes to keep a stream as defined and to read it."""
    api, name = "$JS.API", stream.name
    return [
        f"{api}.STREAM.CREATE.{name}",
        f"{api}.STREAM.UPDATE.{name}",
        f"{api}.STREAM.INFO.{name}",
        f"{api}.CONSUMER.CREATE.{name}.>",
        f"{api}.CONSUMER.INFO.{name}.*",
        f"{api}.CONSUMER.MSG.NEXT.{name}.*",
        f"$JS.ACK.{name}.>",
    ]


def grant(role: Role, subjects: Subjects, name: str = Subjects.ANY) -> Grant:
    """What a client of `role` named `name` may do; the default name stands for any."""
    if role is Role.ANONYMOUS:
        says = [f"{subjects.prefix}.branch.event.{shard}" for shard in SHARDS]
        return Grant(says, ["_INBOX.*", "_INBOX.*.*"], responds=False, unheard=["_INBOX.*.*.>"])
    publish, subscribe, streams = _OF_ROLE[role](subjects, name)
    if streams:
        publish += ["$JS.API.STREAM.NAMES", *(use for stream in streams for use in stream_use(stream))]
    if role is Role.OPERATOR:
        return Grant([*publish, "$SRV.>"], [*subscribe, "_INBOX.>"], responds=False)
    service = f"ei-{role}"
    hears = [f"{inbox(role)}.>", "$SRV.*", f"$SRV.*.{service}", f"$SRV.*.{service}.*"]
    return Grant(publish, subscribe + hears, responds=role is not Role.HARNESS)


_Parts = tuple[list[str], list[str], list[Stream]]


def _router(s: Subjects, name: str) -> _Parts:
    publish = [
        s.branch_events(),
        s.telemetry_router(name),
        s.telemetry_request(s.ANY),
        s.serve(s.ANY),
        s.cancel(s.ANY),
        s.resend(s.ANY),
        s.query_directory(s.ANY),
        s.query_planner(s.ANY),
        s.node_hello_query(),
    ]
    subscribe = [
        s.reply(name),
        s.prompt(name),
        s.telemetry_node(s.ANY),
        s.telemetry_iteration(s.ANY),
        s.telemetry_request(s.ANY),
        s.telemetry_router(s.ANY),
        s.phase_state(s.ANY),
        s.planner_models(),
        s.node_hello(s.ANY),
    ]
    return publish, subscribe, [branch_stream(s), phase_stream(s), planner_stream(s)]


def _planner(s: Subjects, name: str) -> _Parts:
    publish = [
        s.phase_command(s.ANY),
        s.planner_decision(),
        s.planner_models(),
        s.query_directory(s.ANY),
        s.node_hello_query(),
    ]
    subscribe = [
        s.query_planner(s.ANY),
        s.telemetry_node(s.ANY),
        s.telemetry_iteration(s.ANY),
        s.telemetry_request(s.ANY),
        s.telemetry_router(s.ANY),
        s.phase_state(s.ANY),
        s.node_hello(s.ANY),
    ]
    return publish, subscribe, [phase_stream(s), planner_stream(s)]


def _directory(s: Subjects, name: str) -> _Parts:
    publish = [s.kv_reference(s.ANY), s.kv_snapshot(s.ANY), s.node_hello_query(), s.telemetry_directory(name)]
    subscribe = [
        s.query_directory(s.ANY),
        s.kv_location(s.ANY),
        s.node_hello(s.ANY),
        s.telemetry_node(s.ANY),
        s.telemetry_router(s.ANY),
        s.telemetry_directory(s.ANY),
    ]
    return publish, subscribe, [branch_stream(s), phase_stream(s)]


def _engine(s: Subjects, name: str) -> _Parts:
    publish = [
        s.telemetry_iteration(name),
        s.telemetry_node(name),
        s.telemetry_request(name),
        s.phase_state(name),
        s.node_hello(name),
        s.node_hello_query(),
        s.reply(s.ANY),
        s.prompt(s.ANY),
        s.handoff(s.ANY),
        *_pool_verbs(s, s.ANY),
    ]
    subscribe = [
        s.serve(name),
        s.handoff(name),
        s.cancel(name),
        s.resend(name),
        s.node_hello_query(),
        s.node_hello(s.ANY),
        s.telemetry_node(s.ANY),
        s.telemetry_router(s.ANY),
    ]
    return publish, subscribe, [phase_stream(s)]


def _kvpool(s: Subjects, name: str) -> _Parts:
    publish = [s.kv_location(name), s.query_directory("references"), s.node_hello_query(), *_pool_verbs(s, s.ANY)]
    subscribe = [
        s.kv_snapshot(name),
        s.kv_reference(name),
        s.node_hello_query(),
        s.node_hello(s.ANY),
        *_pool_verbs(s, name),
    ]
    return publish, subscribe, []


def _harness(s: Subjects, name: str) -> _Parts:
    return [s.branch_events()], [], []


def _operator(s: Subjects, name: str) -> _Parts:
    publish = [
        s.branch_events(),
        s.query_planner(s.ANY),
        s.query_directory(s.ANY),
        s.kv_snapshot(s.ANY),
        s.node_hello_query(),
    ]
    return publish, [f"{s.prefix}.>"], [branch_stream(s), phase_stream(s), planner_stream(s)]


def _pool_verbs(s: Subjects, name: str) -> list[str]:
    return [f"{s.prefix}.pool.*.{name}"]


_OF_ROLE = {
    Role.ROUTER: _router,
    Role.PLANNER: _planner,
    Role.DIRECTORY: _directory,
    Role.ENGINE: _engine,
    Role.KVPOOL: _kvpool,
    Role.HARNESS: _harness,
    Role.OPERATOR: _operator,
}
