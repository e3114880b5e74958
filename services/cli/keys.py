"""`ei keys`: the nkeys of a deployment and the broker's configuration with what each key may do."""

from pathlib import Path

import msgspec

from schemas.roles import Role, grant
from schemas.subjects import DEFAULT_PARTITION, Subjects
from services.broker import BrokerConfig, Member, config_text, users, write_keys

OPERATOR = Member(Role.OPERATOR, "ei")


class KeyPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Who takes part. `host` and `port` are where the broker listens; `store` where it keeps its streams."""

    nodes: tuple[str, ...]
    routers: tuple[str, ...] = ("r0",)
    partition: str = DEFAULT_PARTITION
    host: str = "0.0.0.0"
    port: int = 4222
    store: Path = Path("/var/lib/evolving-infra/nats")


def members(plan: KeyPlan) -> list[Member]:
    """Every client that gets a key of its own."""
    found = [Member(Role.ROUTER, name) for name in plan.routers]
    found += [Member(Role.PLANNER, "planner"), Member(Role.DIRECTORY, "directory")]
    for node in plan.nodes:
        found += [Member(Role.ENGINE, node), Member(Role.KVPOOL, node)]
    return [*found, OPERATOR, Member(Role.HARNESS, "harness")]


def key_path(directory: Path, member: Member) -> Path:
    """Where the seed of `member` lies."""
    return directory / f"{member.role}-{member.name}.nk"


def write(directory: Path, plan: KeyPlan) -> list[Path]:
    """Write `keys/*.nk` and `nats.conf` below `directory`; keys that exist are kept. Returns what was written.

    A node added later gets its key, and the broker learns of it by `nats-server --signal reload`.
    """
    keys = directory / "keys"
    wanted = members(plan)
    missing = [member for member in wanted if not key_path(keys, member).exists()]
    written = list(write_keys(keys, missing).values())
    subjects = Subjects(plan.partition)
    config = BrokerConfig(
        host=plan.host,
        port=plan.port,
        users=users({member: key_path(keys, member) for member in wanted}, subjects),
        anonymous=grant(Role.ANONYMOUS, subjects),
    )
    path = directory / "nats.conf"
    path.touch(mode=0o600)
    path.write_text(config_text(config, plan.store))
    return [*written, path]
