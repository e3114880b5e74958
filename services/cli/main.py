"""`ei`: the command line. Each command loads only what it needs, so that the quick ones stay quick."""

import asyncio
import re
import sys
from collections.abc import Coroutine
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Evolving Infra: a serving cluster that adapts while it runs."
)

Port = Annotated[int | None, typer.Option(help="Port of the local cluster (8000).")]
Url = Annotated[str | None, typer.Option(help="HTTP address of the router; EI_URL.")]
Nats = Annotated[str | None, typer.Option(help="Address of the broker; EI_NATS_URL. The key comes from EI_NATS_NKEY.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the report with every request to this file.")]


class EngineKind(StrEnum):
    SGLANG = "sglang"
    TIMED = "timed"


class NodePhase(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class DeploymentName(StrEnum):
    COMPOSE = "compose"
    SYSTEMD = "systemd"


class Mode(StrEnum):
    ON = "on"
    OFF = "off"
    DRY_RUN = "dry-run"


def _run(work: Coroutine[Any, Any, Any]) -> Any:
    """Run one command's work; a CommandError becomes one line and exit code 1."""
    from services.cli.connection import CommandError

    try:
        return asyncio.run(work)
    except CommandError as error:
        typer.echo(f"ei: {error}", err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt as interrupt:
        raise typer.Exit(130) from interrupt


@app.command()
def up(
    nodes: Annotated[int, typer.Option(min=1, max=256, help="Number of nodes.")] = 3,
    engine: Annotated[EngineKind, typer.Option(help="What runs on the nodes.")] = EngineKind.SGLANG,
    model: Annotated[
        Path | None, typer.Option(help="Folder of a Hugging Face model; default: the bundled one.")
    ] = None,
    script: Annotated[
        Path | None, typer.Option(help="Replies the timed engine plays: [[reply]] tables of pattern, text and calls.")
    ] = None,
    nats: Nats = None,
    port: Annotated[int, typer.Option(help="HTTP port of the router.")] = 8000,
    split: Annotated[str | None, typer.Option(help="Initial split, such as 2P1D.")] = None,
    config: Annotated[
        list[str] | None, typer.Option("--set", help="A setting, SERVICE.KEY=VALUE, such as engine.max_running=8.")
    ] = None,
    logs: Annotated[Path | None, typer.Option(help="Keep the logs of all services in this folder.")] = None,
) -> None:
    """Run a local cluster until Ctrl-C: broker, router, planner, directory and nodes."""
    from services.cli.cluster.up import UpOptions, run_cluster

    sys.exit(
        run_cluster(
            UpOptions(
                nodes=nodes,
                engine=engine.value,
                model=model,
                script=script,
                nats=nats,
                port=port,
                split=split,
                settings=config or [],
                logs=logs,
            )
        )
    )


@app.command()
def status(
    branches: Annotated[bool, typer.Option("--branches", help="Show the tree of branches.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    port: Port = None,
    url: Url = None,
) -> None:
    """Nodes, phases, split, queues, KV use and the last planner decision."""
    from services.cli.connection import find_target
    from services.cli.status import show_status

    _run(show_status(find_target(port, url), branches=branches, as_json=as_json))


@app.command()
def split(
    wanted: Annotated[str, typer.Argument(metavar="SPLIT", help="Such as 2P2D.")],
    port: Port = None,
    nats: Nats = None,
) -> None:
    """Order a split and say how long the switch took and what was lost."""
    from schemas.phase import PlannerQuery
    from services.cli.connection import find_target
    from services.cli.orders import order, switch_lines

    query = PlannerQuery(split=wanted, reason="ei split")
    for line in switch_lines(_run(order(find_target(port, None, nats), "split", query, typer.echo))):
        typer.echo(line)


@app.command()
def phase(node: str, wanted: NodePhase, port: Port = None, nats: Nats = None) -> None:
    """Order the phase of one node."""
    from schemas.phase import Phase, PlannerQuery
    from services.cli.connection import find_target
    from services.cli.orders import order, switch_lines

    query = PlannerQuery(node=node, phase=Phase(wanted.value), reason="ei phase")
    for line in switch_lines(_run(order(find_target(port, None, nats), "phase", query, typer.echo))):
        typer.echo(line)


@app.command()
def pin(node: str, port: Port = None, nats: Nats = None) -> None:
    """Keep a node at its phase: no order for a split moves it."""
    _pin(node, port, nats, pinned=True)


@app.command()
def unpin(node: str, port: Port = None, nats: Nats = None) -> None:
    """Let splits move the node again."""
    _pin(node, port, nats, pinned=False)


def _pin(node: str, port: int | None, nats: str | None, *, pinned: bool) -> None:
    from schemas.phase import PlannerQuery
    from services.cli.connection import find_target
    from services.cli.orders import tell

    reply = _run(tell(find_target(port, None, nats), "pin", PlannerQuery(node=node, pinned=pinned, reason="ei pin")))
    typer.echo(f"pinned: {', '.join(reply.pinned) or 'none'}")


@app.command()
def planner(mode: Mode, port: Port = None, nats: Nats = None) -> None:
    """Switch the planner's decisions on or off, or let it only say what it would do (dry-run, the default)."""
    from schemas.phase import PlannerQuery
    from services.cli.connection import find_target
    from services.cli.orders import tell

    reply = _run(tell(find_target(port, None, nats), "mode", PlannerQuery(mode=mode.value, reason="ei planner")))
    typer.echo(f"planner: {reply.mode}")


@app.command()
def explain(
    what: Annotated[
        str,
        typer.Argument(
            metavar="REQUEST|BRANCH|DECISION", help="Id of a request, of a branch, or of a decision (or its beginning)."
        ),
    ] = "last",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    port: Port = None,
    url: Url = None,
    nats: Nats = None,
) -> None:
    """Why: the cause of every token a request computed; or of a decision every split, its gain, what was against it."""
    from services.cli import explain_request
    from services.cli.connection import find_target
    from services.cli.explain_decision import LAST, show_decision

    target = find_target(port, url, nats)
    found = None if what == LAST else _run(explain_request.find(target, what))
    if found is not None:
        explain_request.show(found, as_json=as_json)
    else:
        _run(show_decision(target, what, as_json=as_json))


@app.command()
def tail(
    subject: Annotated[str | None, typer.Argument(help="A topic such as telemetry.node, or a whole subject.")] = None,
    node: Annotated[str | None, typer.Option(help="Only messages about this node.")] = None,
    branch: Annotated[str | None, typer.Option(help="Only messages about this branch.")] = None,
    count: Annotated[int | None, typer.Option(min=1, help="End after so many messages.")] = None,
    port: Port = None,
    nats: Nats = None,
) -> None:
    """Decoded messages from the bus, as they pass."""
    from services.cli.connection import find_target
    from services.cli.tail import Filter
    from services.cli.tail import tail as listen

    _run(listen(find_target(port, None, nats), subject, Filter(node=node, branch=branch), count=count))


@app.command()
def simulate(
    scenario: Annotated[Path, typer.Argument(help="A scenario file (TOML), as in bench/scenarios.")],
    system: Annotated[str, typer.Option(help="Which system decides: ours, static-own, dynamo-1.5.1, ...")] = "ours",
    seed: Annotated[int, typer.Option(help="Order of agents and everything drawn.")] = 1,
    agents: Annotated[int | None, typer.Option(min=0, help="Agents at a time, instead of the scenario's.")] = None,
    split: Annotated[str | None, typer.Option(help="Split at the start, such as 4P5D.")] = None,
    warm_up: Annotated[float | None, typer.Option(min=0, help="Simulated seconds before scoring.")] = None,
    scored: Annotated[float | None, typer.Option(min=1, help="Simulated seconds that are scored.")] = None,
    traces: Annotated[Path | None, typer.Option(help="Folder of the traces; EI_TRACES, data/traces.")] = None,
    json_file: JsonFile = None,
    plots: Annotated[Path | None, typer.Option(help="Write pictures to this folder.")] = None,
    record: Annotated[Path | None, typer.Option(help="Write a trace for ui.perfetto.dev (.json or .json.gz).")] = None,
) -> None:
    """Run a scenario in virtual time, with the cluster's own rules or those of another system."""
    from services.cli.connection import CommandError
    from services.cli.simulate import Wanted, table
    from services.cli.simulate import run as simulated

    wanted = Wanted(scenario, system, seed, agents, split, warm_up, scored, traces, json_file, plots, record)
    try:
        typer.echo(table(simulated(wanted)))
    except CommandError as error:
        typer.echo(f"ei: {error}", err=True)
        raise typer.Exit(1) from error


@app.command()
def replay(
    trace: Annotated[Path, typer.Argument(help="A branch trace (.jsonl or .jsonl.gz).")],
    agents: Annotated[int, typer.Option(min=1, help="Closed loop: so many agents at a time.")] = 1,
    rate: Annotated[float | None, typer.Option(min=0.001, help="Open loop: agents started a minute.")] = None,
    speed: Annotated[float, typer.Option(min=0.001, help="Recorded waits are divided by it.")] = 1.0,
    tokens_per_block: Annotated[
        int | None, typer.Option(min=1, help="Tokens a recorded block of 64 becomes; answers scale with it.")
    ] = None,
    max_pause: Annotated[float | None, typer.Option(min=0, help="Cap recorded waits at so many seconds.")] = None,
    max_context: Annotated[int | None, typer.Option(min=1, help="Tokens a context may have, after scaling.")] = None,
    requests_per_agent: Annotated[int | None, typer.Option(min=1, help="Play so many requests of each agent.")] = None,
    plays: Annotated[int | None, typer.Option(min=1, help="Use the first so many agents of the trace.")] = None,
    duration: Annotated[float | None, typer.Option(min=1, help="Start agents anew for so many seconds.")] = None,
    warmup: Annotated[float, typer.Option(min=0, help="Do not score requests of the first so many seconds.")] = 0.0,
    block_size: Annotated[
        int | None, typer.Option(min=1, help="Block size of the engine; asked of the cluster.")
    ] = None,
    seed: Annotated[str, typer.Option(help="Chooses the tokens of the prompts.")] = "0",
    json_file: JsonFile = None,
    port: Port = None,
    url: Url = None,
    nats: Nats = None,
) -> None:
    """Play recorded agents against a running cluster and report what they saw."""
    import msgspec
    from rich.console import Console

    from services.cli.connection import find_target
    from services.cli.replay.agent import Pace
    from services.cli.replay.command import ReplayOptions
    from services.cli.replay.command import replay as play
    from services.cli.replay.plan import Limits

    options = ReplayOptions(
        trace=trace,
        pace=Pace(
            agents=agents,
            rate_per_min=rate,
            speed=speed,
            duration_s=duration,
            warmup_s=warmup,
            max_pause_s=max_pause,
        ),
        limits=Limits(context_tokens=max_context, requests_per_agent=requests_per_agent),
        tokens_per_block=tokens_per_block,
        plays=plays,
        block_size=block_size,
        seed=seed,
    )
    if json_file is not None and not json_file.parent.is_dir():
        raise typer.BadParameter(f"{json_file.parent} is not a folder", param_hint="--json")
    report = _run(play(find_target(port, url, nats), options, Console()))
    if json_file is not None:
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(report, enc_hook=str)))
    if report.summary.failed:
        raise typer.Exit(1)


@app.command()
def keys(
    folder: Annotated[Path, typer.Argument(help="Gets keys/*.nk and nats.conf; keys that are there stay.")],
    nodes: Annotated[str, typer.Option(help="Names of the nodes, separated by commas.")] = "node-0",
    host: Annotated[str, typer.Option(help="Address on which the broker listens.")] = "0.0.0.0",
    port: Annotated[int, typer.Option(help="Port on which the broker listens.")] = 4222,
    store: Annotated[Path, typer.Option(help="Where the broker keeps its streams.")] = Path("/var/lib/nats"),
) -> None:
    """Make a key for every service and the broker's configuration with what each key may do."""
    from services.cli.keys import KeyPlan, write

    names = tuple(name.strip() for name in nodes.split(",") if name.strip())
    for path in write(folder, KeyPlan(nodes=names, host=host, port=port, store=store)):
        typer.echo(str(path))


@app.command()
def config(
    deployment: DeploymentName,
    folder: Annotated[Path, typer.Argument(help="Gets one TOML file per service.")],
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes.")] = 3,
) -> None:
    """Write the settings of every service for compose or systemd, from the catalogue that `ei up` uses."""
    from services.cli.config import Deployment, write_config

    for path in write_config(Deployment(deployment.value), nodes, folder):
        typer.echo(str(path))


@app.command()
def demo(
    engine: Annotated[EngineKind, typer.Option(help="What runs on the nodes.")] = EngineKind.SGLANG,
    port: Annotated[int, typer.Option(help="HTTP port of the router.")] = 8000,
    leave: Annotated[bool, typer.Option("--exit", help="End after the replay; RUN_EXIT=1 does the same.")] = False,
) -> None:
    """What `make run` plays: a cluster on a real model, agents on it, two switches, and a table of what happened."""
    from services.cli.demo.play import run_demo

    sys.exit(run_demo(engine.value, port, leave=leave))


@app.command()
def gateway(
    upstream: Annotated[str, typer.Option(help="Address of the server to put it in front of, http://HOST:PORT.")],
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8100,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    nats: Annotated[
        str | None, typer.Option(help="Broker to publish branch events to; EI_NATS_URL; without it they are logged.")
    ] = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Identity and branch events in front of any OpenAI- or Anthropic-compatible server."""
    if not re.match(r"https?://[^/]", upstream):
        raise typer.BadParameter(f"{upstream!r} is no http address", param_hint="--upstream")
    from services.cli.gateway import run_gateway

    sys.exit(run_gateway(upstream, host, port, nats, log_level))


def main() -> None:
    """Entry point of `ei`."""
    app()


if __name__ == "__main__":
    main()
