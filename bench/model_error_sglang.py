"""SGLang on this CPU: a model learned while small agents play, asked about iterations under another load."""

import asyncio
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from schemas.iteration_model import MEGA, IterationModel
from schemas.phase import Phase
from schemas.subjects import Subjects
from schemas.telemetry import ITERATION_BATCH, Iteration
from services.bus import Delivery
from services.cli.cluster.local import local_cluster
from services.cli.replay.client import CompletionClient
from services.cli.replay.command import http_session
from services.cli.replay.contexts import TokenSource
from services.planner.core.iteration_model import LearnedModels
from services.planner.core.options import ModelSettings

PORT, READY_S = 18_500, 300.0
NODE = "node-0"


@dataclass(frozen=True, slots=True)
class Load:
    """Agents that ask for `output` tokens after prompts of `least` to `most`, half of them begun by an old prompt."""

    agents: int
    least: int
    most: int
    output: int


FITTED, ASKED = Load(3, 48, 700, 48), Load(6, 100, 1400, 96)


@dataclass
class Measured:
    """Relative errors in percent: of iterations over one request, and over several; seconds until both were below 7."""

    single: float
    batch: float
    seconds_to_7: float | None
    iterations: int
    model: IterationModel


@dataclass
class _Heard:
    """What comes over the bus: learned from while `learned` is set, kept for judgement otherwise."""

    learned: LearnedModels = field(default_factory=lambda: LearnedModels(ModelSettings(refit_s=2.0)))
    begun: float = field(default_factory=time.monotonic)
    learning: bool = True
    fits: list[tuple[float, IterationModel]] = field(default_factory=list)
    judged: list[Iteration] = field(default_factory=list)

    async def take(self, delivery: Delivery) -> None:
        batch = ITERATION_BATCH.decode(delivery.data)
        if not self.learning:
            self.judged += batch.iterations
            return
        now = time.monotonic()
        self.learned.iterations(batch, now)
        if self.learned.advance(now, [batch.node]):
            self.fits += [(now - self.begun, model) for model in self.learned.models([batch.node])]


async def measure(seconds: float, folder: Path) -> Measured:
    """Learn for `seconds` under one load, then judge for as long under another."""
    arguments = ["--engine", "sglang", "--nodes", "1"]
    heard = _Heard()
    async with local_cluster(PORT, arguments, folder / "cluster.log", READY_S) as cluster, http_session() as session:
        client = CompletionClient(session, cluster.target.url, "")
        await _play(client, Load(1, 32, 64, 8), 5.0, "first")
        async with cluster.target.bus() as bus:
            heard.begun = time.monotonic()
            await bus.subscribe(Subjects().telemetry_iteration(NODE), heard.take)
            await _play(client, FITTED, seconds, "fit")
            heard.learning = False
            await _play(client, ASKED, seconds, "ask")
    if not heard.fits:
        raise RuntimeError("SGLang reported no iterations")
    final = heard.fits[-1][1]
    single, batch = errors(final, heard.judged)
    good = [at for at, model in heard.fits if max(errors(model, heard.judged)) < 7.0]
    return Measured(single, batch, good[0] if good else None, len(heard.judged), final)


async def _play(client: CompletionClient, load: Load, seconds: float, name: str) -> None:
    draw, source = random.Random(name), TokenSource(range(100, 40_000), name)
    until = time.monotonic() + seconds

    async def agent(number: int) -> None:
        old = None
        for turn in range(10_000):
            if time.monotonic() > until:
                return
            new = source.tokens(f"{name} {number} {turn}", draw.randint(load.least, load.most))
            prompt = new if old is None or turn % 2 == 0 else old + new[: load.least]
            answer = await client.complete(prompt, load.output, None, lambda _: None)
            if answer.error:
                raise RuntimeError(f"SGLang answered with {answer.error}")
            old = prompt if len(prompt) < load.most else None

    async with asyncio.TaskGroup() as tasks:
        for number in range(load.agents):
            tasks.create_task(agent(number))


def errors(model: IterationModel, iterations: list[Iteration]) -> tuple[float, float]:
    """(single, batch): mean relative error in percent, prefill and decode weighing the same."""
    parts = {
        many: [_mean(_errors(model, iterations, phase, many=many)) for phase in (Phase.PREFILL, Phase.DECODE)]
        for many in (False, True)
    }
    return sum(parts[False]) / 2, sum(parts[True]) / 2


def _errors(model: IterationModel, iterations: list[Iteration], phase: Phase, *, many: bool) -> Iterator[float]:
    for one in iterations:
        if one.phase is phase and (one.requests > 1) is many and one.duration_s > 0:
            predicted = _prefill_s(model, one) if phase is Phase.PREFILL else _decode_s(model, one)
            yield abs(predicted / one.duration_s - 1.0)


def _prefill_s(model: IterationModel, one: Iteration) -> float:
    tokens = one.uncached_tokens
    knee = model.c5 * max(0, tokens - model.u0)
    return model.c0 + model.c1 * tokens + model.c2 * one.attention_pairs + model.c3 * one.restored_tokens + knee


def _decode_s(model: IterationModel, one: Iteration) -> float:
    return model.d0 + model.d2 * one.requests + model.d3 * one.context_tokens / MEGA


def _mean(values: Iterator[float]) -> float:
    found = list(values)
    return 100.0 * sum(found) / len(found) if found else 0.0
