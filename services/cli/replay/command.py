"""`ei replay`: from its options to the report."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import msgspec
from rich.console import Console

from services.btrace import Play, TraceError, read_trace
from services.cli.connection import CommandError, Target
from services.cli.progress import progress
from services.cli.replay.agent import Observer, Pace, Stage
from services.cli.replay.alphabet import AlphabetError, alphabet_of
from services.cli.replay.client import CompletionClient, get_json
from services.cli.replay.contexts import Scale, TokenSource
from services.cli.replay.ideal import IdealCache
from services.cli.replay.plan import Limits, cut
from services.cli.replay.player import play
from services.cli.replay.records import RequestRecord
from services.cli.replay.report import Summary, summarise
from services.cli.replay.table import summary_table
from services.cli.replay.telemetry import ClusterWatch

_TELEMETRY_GRACE_S = 1.0


class ReplayOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to play and how; see `Pace` and `Limits` for the rest."""

    trace: Path
    pace: Pace
    limits: Limits
    tokens_per_block: int | None = None
    plays: int | None = None
    block_size: int | None = None
    seed: str = "0"


class ReplayReport(msgspec.Struct, frozen=True, kw_only=True):
    """The file `--json` writes."""

    trace: str
    tokens_per_block: int
    pace: Pace
    limits: Limits
    summary: Summary
    requests: list[RequestRecord]


@asynccontextmanager
async def http_session() -> AsyncIterator[aiohttp.ClientSession]:
    """A client without a limit on connections; a stream may be silent for as long as a prefill waits."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=1800)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        yield session


def load_plays(options: ReplayOptions) -> tuple[list[Play], Scale]:
    """The agents to play, cut to the limits; CommandError when none is left."""
    try:
        trace = read_trace(options.trace, options.plays)
    except TraceError as error:
        raise CommandError(str(error)) from error
    scale = Scale(trace.block_size, options.tokens_per_block or trace.block_size)
    plays = [kept for kept in (cut(one, scale, options.limits) for one in trace.plays) if kept.rows]
    if not plays:
        raise CommandError(f"no agent of {options.trace} has a request within {options.limits}")
    return plays, scale


async def prepare_stage(
    session: aiohttp.ClientSession, url: str, options: ReplayOptions, scale: Scale, observer: Observer | None = None
) -> Stage:
    """Ask the cluster what it serves; CommandError when it does not answer."""
    try:
        models = await get_json(session, f"{url}/v1/models")
        model = str(models["data"][0]["id"])
        block_size = options.block_size or await _block_size(session, url)
        alphabet = await alphabet_of(session, url, model)
    except (aiohttp.ClientError, AlphabetError, msgspec.MsgspecError, LookupError, OSError) as error:
        raise CommandError(f"{url} does not serve: {type(error).__name__}: {error}") from error
    run_id = f"r{int(time.time() * 1000):x}"
    return Stage(
        client=CompletionClient(session, url, model),
        pace=options.pace,
        scale=scale,
        source=TokenSource(alphabet, options.seed),
        ideal=IdealCache(block_size),
        run_id=run_id,
        observer=observer,
    )


async def _block_size(session: aiohttp.ClientSession, url: str) -> int:
    cluster = await get_json(session, f"{url}/v1/cluster")
    return int(cluster["nodes"][0]["block_size"])


async def replay(target: Target, options: ReplayOptions, console: Console) -> ReplayReport:
    """Play, with a line of progress, and report."""
    plays, scale = load_plays(options)
    async with http_session() as session:
        stage = await prepare_stage(session, target.url, options, scale)
        async with target.bus() as bus:
            watch = ClusterWatch(bus, target.partition, time.time())
            await watch.start()
            watch.split = await current_split(session, target.url)
            async with progress(console, lambda: progress_line(stage)):
                await play(plays, stage)
            elapsed_s = stage.elapsed_s
            await asyncio.sleep(_TELEMETRY_GRACE_S)
            watch.join(stage.records)
    summary = summarise(
        stage.records,
        agents=stage.agents_started,
        ended_s=stage.agents_ended_s,
        elapsed_s=elapsed_s,
        warmup_s=options.pace.warmup_s,
        switches=watch.switches(),
        split=watch.split,
    )
    console.print(summary_table(summary, f"{options.trace.name} against {target.url}"))
    return ReplayReport(
        trace=str(options.trace),
        tokens_per_block=scale.target,
        pace=options.pace,
        limits=options.limits,
        summary=summary,
        requests=stage.records,
    )


async def current_split(session: aiohttp.ClientSession, url: str) -> str:
    """The split as the router sees it, "" when it does not say."""
    try:
        return str((await get_json(session, f"{url}/v1/cluster")).get("split", ""))
    except aiohttp.ClientError:
        return ""


def progress_line(stage: Stage) -> str:
    """One line about a running replay."""
    done = len(stage.records)
    failed = sum(1 for record in stage.records if record.error)
    prompt = sum(record.prompt_tokens for record in stage.records)
    cached = sum(record.cached_tokens for record in stage.records)
    hit = f"{100 * cached / prompt:.1f} %" if prompt else "-"
    agents = f"{stage.agents_started - len(stage.agents_ended_s)} agents playing, {len(stage.agents_ended_s)} ended"
    return f"{stage.elapsed_s:6.0f} s  {done} answered, {failed} failed, hit {hit}, {agents}"
