"""The one place that says which processes a cluster has, how each is started and what its settings are.

`ei up` forks these, `ei config` writes their files for compose and systemd, and both start the same commands.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from schemas.phase import Phase, Split
from schemas.roles import Role
from schemas.subjects import DEFAULT_PARTITION
from services.broker import Member
from services.cli.keys import key_path

ROUTER_NAME = "r0"


class Kind(StrEnum):
    """The services, in the order in which they start; they stop in the opposite one."""

    KVPOOL = "kvpool"
    DIRECTORY = "directory"
    PLANNER = "planner"
    ENGINE = "engine"
    ROUTER = "router"


STAGE = {Kind.KVPOOL: 1, Kind.DIRECTORY: 2, Kind.PLANNER: 2, Kind.ENGINE: 3, Kind.ROUTER: 4}
"""Services of one stage start and stop together; the broker is stage 0."""
_ROLES = {
    Kind.KVPOOL: Role.KVPOOL,
    Kind.DIRECTORY: Role.DIRECTORY,
    Kind.PLANNER: Role.PLANNER,
    Kind.ENGINE: Role.ENGINE,
    Kind.ROUTER: Role.ROUTER,
}


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where a deployment keeps its things.

    `keys` None: no key, or one that the environment names. `ports`: HTTP port of the first of each kind, the next one
    for the second; any free one where there is none. `transport` is how pools reach one another.
    `match_timeout_s`: how long the router waits for the directory (None: its default, made for cores of its own).
    `sockets`, `arenas`, `state` are directories; `prefix` starts the name of every arena.
    """

    nats_url: str
    keys: Path | None
    sockets: Path
    arenas: Path
    state: Path
    prefix: str = "ei-"
    http_host: str = "127.0.0.1"
    ports: dict[Kind, int] = field(default_factory=dict)
    transport: str = "shm"
    ports_dir: str = ""
    partition: str = DEFAULT_PARTITION
    match_timeout_s: float | None = None

    def arena(self, node: str) -> Path:
        return self.arenas / f"{self.prefix}{node}.arena"

    def socket(self, node: str) -> Path:
        return self.sockets / f"{node}.sock"

    def port(self, kind: Kind, index: int) -> int:
        first = self.ports.get(kind, 0)
        return first + index if first else 0


@dataclass(frozen=True, kw_only=True)
class NodePlan:
    """What runs on every node. `engine` is sglang or timed; `model` a folder; `l2_tokens` the node's host memory.

    `timed`: what the timed engine is told beside that.
    """

    engine: str
    model: str
    model_name: str
    block_size: int
    block_bytes: int
    l2_tokens: int
    phases: dict[str, Phase]
    timed: dict[str, Any] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return list(self.phases)

    def engine_table(self) -> dict[str, Any]:
        """The engine's own settings: what the pool is told about blocks must be what the engine makes."""
        table: dict[str, Any] = {"model": self.model_name, "block_size": self.block_size}
        if self.engine == "sglang":
            return table | {"model_path": self.model}
        return table | {"block_bytes": self.block_bytes} | self.timed

    @property
    def arena_bytes(self) -> int:
        """About what the arena of one node takes."""
        return self.l2_tokens // self.block_size * (self.block_bytes + 256)

    @property
    def split(self) -> str:
        prefill, decode = (list(self.phases.values()).count(phase) for phase in (Phase.PREFILL, Phase.DECODE))
        return f"split {prefill}P{decode}D" if prefill else "one node for both phases"


@dataclass(frozen=True, kw_only=True)
class ServiceSpec:
    """One process: `command --config <FILE with settings>`, or `module`'s main() with the same arguments."""

    name: str
    kind: Kind
    settings: dict[str, Any]

    @property
    def command(self) -> str:
        return f"ei-{self.kind}"

    @property
    def module(self) -> str:
        return f"services.{self.kind}.__main__"

    @property
    def stage(self) -> int:
        return STAGE[self.kind]

    @property
    def label(self) -> str:
        """What people call it: its name, the router `router`."""
        return "router" if self.kind is Kind.ROUTER else self.name

    @property
    def file(self) -> str:
        """The name of its configuration file."""
        return f"{self.label}.toml"


def default_split(nodes: int) -> dict[str, Phase]:
    """One node serves both phases; of more, two thirds prefill, at least one each."""
    if nodes == 1:
        return {"node-0": Phase.BOTH}
    prefill = max(1, min(nodes - 1, 2 * nodes // 3))
    return phases_of(Split(prefill, nodes - prefill))


def phases_of(split: Split) -> dict[str, Phase]:
    """Node names with the phases of a split, prefill first."""
    phases = [Phase.PREFILL] * split.prefill + [Phase.DECODE] * split.decode
    return {f"node-{index}": phase for index, phase in enumerate(phases)}


def services_of(places: Places, plan: NodePlan) -> list[ServiceSpec]:
    """Every service of a deployment with all its settings, in the order in which they start."""
    specs = [_kvpool(places, plan, index, node) for index, node in enumerate(plan.names)]
    specs += [_directory(places), _planner(places, plan)]
    specs += [_engine(places, plan, index, node) for index, node in enumerate(plan.names)]
    return [*specs, _router(places)]


def _spec(places: Places, kind: Kind, name: str, settings: dict[str, Any], *, index: int = 0) -> ServiceSpec:
    """What all services are told, and what this one is. Its key is issued to its node, or to its own name."""
    common: dict[str, Any] = {
        "name": name,
        "nats_url": places.nats_url,
        "partition": places.partition,
        "http_host": places.http_host,
        "http_port": places.port(kind, index),
    }
    if places.keys is not None:
        common["nats_nkey"] = str(key_path(places.keys, Member(_ROLES[kind], settings.get("node", name))))
    if places.ports_dir:
        common["ports_dir"] = places.ports_dir
    return ServiceSpec(name=name, kind=kind, settings=common | settings)


def _kvpool(places: Places, plan: NodePlan, index: int, node: str) -> ServiceSpec:
    settings = {
        "node": node,
        "model": plan.model_name,
        "block_size": plan.block_size,
        "block_bytes": plan.block_bytes,
        "capacity_blocks": plan.l2_tokens // plan.block_size,
        "arena": str(places.arena(node)),
        "socket": str(places.socket(node)),
        "transport": places.transport,
    }
    return _spec(places, Kind.KVPOOL, f"kvpool-{node}", settings, index=index)


def _directory(places: Places) -> ServiceSpec:
    return _spec(places, Kind.DIRECTORY, "directory", {"state_dir": str(places.state)})


def _planner(places: Places, plan: NodePlan) -> ServiceSpec:
    return _spec(places, Kind.PLANNER, "planner", {"block_size": plan.block_size})


def _engine(places: Places, plan: NodePlan, index: int, node: str) -> ServiceSpec:
    settings = {
        "node": node,
        "engine": plan.engine,
        "phase": plan.phases[node].value,
        "pool_socket": str(places.socket(node)),
        plan.engine: plan.engine_table(),
    }
    return _spec(places, Kind.ENGINE, f"engine-{node}", settings, index=index)


def _router(places: Places) -> ServiceSpec:
    waits = {} if places.match_timeout_s is None else {"match_timeout_s": places.match_timeout_s}
    return _spec(places, Kind.ROUTER, ROUTER_NAME, waits)
