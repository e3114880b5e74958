"""`ei config`: the configuration files of a deployment, from the catalogue that `ei up` uses."""

from enum import StrEnum
from pathlib import Path

from services.cli.cluster import toml
from services.cli.cluster.catalogue import Kind, Places, ServiceSpec, services_of
from services.cli.cluster.sizes import plan_nodes

PORTS = {Kind.ROUTER: 8000, Kind.PLANNER: 9101, Kind.DIRECTORY: 9102, Kind.ENGINE: 9110, Kind.KVPOOL: 9210}
"""Where /health, /ready and /metrics are; of several nodes on one machine the next port each."""


class Deployment(StrEnum):
    """Who starts the services: docker compose, with a container each; systemd, on machines of their own."""

    COMPOSE = "compose"
    SYSTEMD = "systemd"


PLACES = {
    Deployment.COMPOSE: Places(
        nats_url="nats://broker:4222",
        keys=Path("/var/lib/evolving-infra/broker/keys"),
        sockets=Path("/run/evolving-infra"),
        arenas=Path("/dev/shm"),
        state=Path("/var/lib/evolving-infra/state"),
        http_host="0.0.0.0",
        ports=PORTS,
    ),
    Deployment.SYSTEMD: Places(
        nats_url="nats://127.0.0.1:4222",
        keys=None,
        sockets=Path("/run/evolving-infra"),
        arenas=Path("/dev/shm"),
        state=Path("/var/lib/evolving-infra"),
        ports=PORTS,
        transport="auto",
    ),
}


def specs_of(deployment: Deployment, nodes: int) -> list[ServiceSpec]:
    """Every service of a deployment of timed nodes."""
    return services_of(PLACES[deployment], plan_nodes(nodes, "timed", None, None))


def write_config(deployment: Deployment, nodes: int, folder: Path) -> list[Path]:
    """Write one file per service below `folder`; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for spec in specs_of(deployment, nodes):
        path = folder / spec.file
        path.write_text(
            f"# {spec.command} --config {path.name}: written by `ei config {deployment}`\n{toml.dumps(spec.settings)}"
        )
        paths.append(path)
    return paths
