"""`ei demo`: the whole show, from a bare cluster to the table of what happened."""

import asyncio
import os
import tempfile
import time
from pathlib import Path

from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table

from services.cli.cluster.local import LocalCluster
from services.cli.connection import CommandError
from services.cli.demo.act import SWITCHES, Act, Performance
from services.cli.demo.compare import Comparison, compare
from services.cli.demo.reference import reference_of
from services.cli.demo.talk import Talk
from services.cli.progress import progress
from services.cli.replay.agent import Pace
from services.cli.replay.command import (
    ReplayOptions,
    current_split,
    http_session,
    load_plays,
    prepare_stage,
    progress_line,
)
from services.cli.replay.plan import Limits
from services.cli.replay.report import Summary, summarise
from services.cli.replay.table import summary_table
from services.cli.replay.telemetry import ClusterWatch

TRACE = Path(__file__).resolve().parents[3] / "data" / "traces" / "cc_smoke.btrace.jsonl.gz"
NODES = 3
AGENTS = 4
LOAD = ReplayOptions(
    trace=TRACE,
    pace=Pace(agents=AGENTS, speed=10, max_pause_s=10),
    limits=Limits(context_tokens=2000, requests_per_agent=6),
    tokens_per_block=2,
    plays=AGENTS,
)
READY_S = 900.0
_TELEMETRY_GRACE_S = 1.0


def run_demo(engine: str, port: int, *, leave: bool) -> int:
    """Play the demo; 0 when nothing was lost or wrong. Serves until Ctrl-C unless `leave` or RUN_EXIT=1."""
    leave = leave or os.environ.get("RUN_EXIT", "") not in ("", "0")
    console = Console()
    demo = _Demo(engine, port, console)
    try:
        return asyncio.run(demo.run(leave=leave))
    except CommandError as error:
        console.print(f"[red]ei demo:[/red] {escape(str(error))}")
        return 1
    except KeyboardInterrupt:
        return 130 if demo.result is None else demo.result


class _Demo:
    """One show on one console; `result` is the exit code once the show is over."""

    def __init__(self, engine: str, port: int, console: Console) -> None:
        self.result: int | None = None
        self._engine, self._console = engine, console
        self._folder = tempfile.TemporaryDirectory(prefix="ei-demo-")
        log = Path(self._folder.name) / "cluster.log"
        self._cluster = LocalCluster(port, ["--engine", engine, "--nodes", str(NODES)], log)

    async def run(self, *, leave: bool) -> int:
        try:
            await self._start()
            self.result = 1 if await self._show() else 0
            if not leave:
                await self._serve()
            return self.result
        finally:
            self._say("stopping")
            await self._cluster.stop()
            self._folder.cleanup()

    async def _start(self) -> None:
        begun = time.monotonic()
        waiting = f"starting {NODES} nodes ({self._engine})"
        async with progress(self._console, lambda: f"{waiting}: {time.monotonic() - begun:.0f} s"):
            await self._cluster.start(READY_S)
        self._say(f"[green]{NODES} nodes ready after {time.monotonic() - begun:.1f} s[/green], split 2P1D")

    async def _show(self) -> list[str]:
        """Play, compare, print; returns what was lost or wrong."""
        target = self._cluster.target
        plays, scale = load_plays(LOAD)
        self._say(
            f"{AGENTS} recorded Claude Code agents, {sum(len(one.rows) for one in plays)} requests of up to "
            f"{LOAD.limits.context_tokens} tokens, and one conversation"
        )
        async with http_session() as session, target.bus() as bus:
            stage = await prepare_stage(session, target.url, LOAD, scale)
            watch = ClusterWatch(bus, target.partition, time.time())
            await watch.start()
            talk = Talk(session, target.url, stage.client.model, f"{stage.run_id}.conversation")
            performance = Performance(target, plays, stage, talk, self._say)
            async with progress(self._console, lambda: progress_line(stage)):
                act = await performance.run()
            elapsed_s = stage.elapsed_s
            await asyncio.sleep(_TELEMETRY_GRACE_S)
            watch.join(stage.records)
            split = await current_split(session, target.url)
        summary = summarise(
            stage.records,
            agents=stage.agents_started,
            ended_s=stage.agents_ended_s,
            elapsed_s=elapsed_s,
            switches=watch.switches(),
            split=split,
        )
        return self._report(act, summary, await self._compare(act))

    async def _compare(self, act: Act) -> Comparison:
        """Ask one plain engine the same; what differs is wrong."""
        reference, done, begun = reference_of(self._engine), 0, time.monotonic()

        def count(number: int) -> None:
            nonlocal done
            done = number

        async with progress(
            self._console,
            lambda: f"the same on one plain engine: {done}/{len(act.played)}, {time.monotonic() - begun:.0f} s",
        ):
            try:
                await reference.start()
                return await compare(act.played, reference, count)
            finally:
                await reference.stop()

    def _report(self, act: Act, summary: Summary, plain: Comparison) -> list[str]:
        problems = [*act.problems]
        problems += [
            f"{d.name}: token {d.index} is {d.got}, a plain engine says {d.expected}" for d in plain.differences
        ]
        missed = len(SWITCHES) - len(act.switches)
        problems += [f"{missed} of {len(SWITCHES)} switches did not take place"] if missed else []
        problems += [f"{reply.failed} requests failed during a switch" for reply in act.switches if reply.failed]
        tokens = sum(len(one.answer) for one in act.played)
        verdict = Table(show_header=False, title="against one plain engine", title_justify="left")
        verdict.add_row("answers compared", f"{len(act.played)}, {tokens} tokens")
        verdict.add_row("answers that differ", str(len(plain.differences)))
        if self._engine == "sglang":
            verdict.add_row("prompt tokens reused there", f"{plain.cached_tokens} of {plain.prompt_tokens}")
            verdict.add_row("time there, one after the other", f"{plain.took_s:.1f} s")
            verdict.add_row("time here, with all pauses", f"{act.took_s:.1f} s")
        self._console.print(Group(summary_table(summary, "what the agents saw"), _switch_table(act), verdict))
        for problem in problems:
            self._say(f"[red]{escape(problem)}[/red]")
        if not problems:
            self._say("[green]no request was lost, every greedy token equals the plain engine's[/green]")
        return problems

    async def _serve(self) -> None:
        """Keep serving until Ctrl-C; CommandError when the cluster ends by itself."""
        url = self._cluster.target.url
        self._say(f"serving on [bold]{url}[/bold] until Ctrl-C, for example:")
        self._console.print(
            f"  curl {url}/v1/chat/completions -H 'content-type: application/json' "
            """-d '{"messages": [{"role": "user", "content": "What is the capital of France?"}]}'""",
            markup=False,
            highlight=False,
        )
        await self._cluster.ended()

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False)


def _switch_table(act: Act) -> Table:
    table = Table(title="switches ordered while the agents worked", title_justify="left")
    for heading in ("split", "node"):
        table.add_column(heading, no_wrap=True)
    for heading in ("took", "waiting moved", "tokens lost", "requests failed"):
        table.add_column(heading, justify="right")
    for reply in act.switches:
        nodes = ", ".join(f"{node.node} > {node.new}" for node in reply.nodes)
        took = f"{reply.took_s or 0.0:.2f} s"
        table.add_row(reply.split_now, nodes, took, str(reply.moved), str(reply.lost_tokens), str(reply.failed))
    return table
