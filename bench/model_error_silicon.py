"""A collocated timed node in virtual time, its times looked up in a measured table, and a model that learns from it.

The loop is the timed engine's: a prefill iteration over what waits, then a decode iteration over what runs, composed by
`services.engine.core.batching`. What it reports goes to the planner's `LearnedModels`, as on the bus.
"""

import json
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from schemas.iteration_model import MEGA, IterationModel
from schemas.phase import Phase
from schemas.telemetry import Iteration, IterationBatch
from services.engine.core.batching import (
    DecodeWork,
    PrefillWork,
    accept_tokens,
    compose_decode,
    compose_prefill,
    finish_prefill,
)
from services.engine.core.timing import DecodeTerms, PrefillTerms, SiliconTable, attention_pairs
from services.planner.core.iteration_model import LearnedModels
from services.planner.core.options import ModelSettings

DATA = Path(__file__).parent.parent / "data" / "silicon"
DRAFTS, FED_TOKENS, ACCEPTED = 3, 4, 2.5
BATCH_TOKENS, MAX_RUNNING = 8192, 256
EXPERTS = {"glm": (8, 256), "kimi": (8, 384)}
NODE = "n0"
Request = tuple[int, int, int]


def load() -> tuple[dict[str, SiliconTable], dict[str, list[Request]]]:
    """The tables by model, and the requests by workload."""
    rows: dict[str, Any] = json.loads((DATA / "gb300_sglang_0.5.14_tp4.json").read_text())
    requests = {name: [tuple(row) for row in found] for name, found in _requests().items()}
    return {model: SiliconTable(rows, model, drafts=DRAFTS) for model in EXPERTS}, requests


def _requests() -> dict[str, list[list[int]]]:
    found: dict[str, list[list[int]]] = json.loads((DATA / "requests.json").read_text())
    return found


@dataclass(slots=True)
class _Agent:
    wake: float
    prefill: PrefillWork | None = None
    decode: DecodeWork | None = None
    output: int = 0


@dataclass
class WarmUp:
    """`agents` take turns on one node that runs both phases; `pause_s` is the mean of their pauses."""

    table: SiliconTable
    requests: Sequence[Request]
    agents: int
    pause_s: float
    seed: int
    now: float = 0.0
    waiting: deque[_Agent] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)
        self._agents = [_Agent(self._draw.expovariate(1 / self.pause_s)) for _ in range(self.agents)]

    def iterations(self) -> Iterator[Iteration]:
        """For ever: what the node reports, as virtual time (`now`) goes on."""
        while True:
            for agent in self._agents:
                if agent.wake <= self.now:
                    agent.wake = float("inf")
                    uncached, cached, agent.output = self._draw.choice(self.requests)
                    agent.prefill = PrefillWork(uncached + cached, cached)
                    self.waiting.append(agent)
            ran = [iteration for iteration in (self._prefill(), self._decode()) if iteration is not None]
            yield from ran
            if not ran:
                self.now = max(self.now, min(agent.wake for agent in self._agents))

    def _prefill(self) -> Iteration | None:
        batch = compose_prefill((agent.prefill for agent in self.waiting if agent.prefill), BATCH_TOKENS)
        if batch is None:
            return None
        seconds = self.table.prefill_s(batch.terms)
        self.now += seconds
        done = {id(work) for work in finish_prefill(batch)}
        for agent in [agent for agent in self.waiting if id(agent.prefill) in done]:
            assert agent.prefill is not None
            self.waiting.remove(agent)
            agent.decode = DecodeWork(agent.prefill.prompt_tokens, agent.output)
            agent.prefill = None
        terms = batch.terms
        return Iteration(
            t=0.0,
            seq=0,
            phase=Phase.PREFILL,
            duration_s=seconds,
            requests=terms.requests,
            uncached_tokens=terms.uncached_tokens,
            attention_pairs=terms.attention_pairs,
            cached_tokens=batch.cached_tokens,
        )

    def _decode(self) -> Iteration | None:
        running = [agent for agent in self._agents if agent.decode is not None]
        batch = compose_decode((agent.decode for agent in running if agent.decode), MAX_RUNNING)
        if batch is None:
            return None
        seconds = self.table.decode_s(batch.terms)
        self.now += seconds
        accepted = sum(accept_tokens(work, ACCEPTED) for work in batch.works)
        for agent in running:
            if agent.decode is not None and agent.decode.left == 0:
                agent.decode, agent.wake = None, self.now + self._draw.expovariate(1 / self.pause_s)
        return Iteration(
            t=0.0,
            seq=0,
            phase=Phase.DECODE,
            duration_s=seconds,
            requests=batch.terms.requests,
            context_tokens=batch.terms.context_tokens,
            accepted_tokens=accepted,
            fed_tokens=FED_TOKENS * batch.terms.requests,
        )


def learn(
    warm_up: WarmUp, model: str, seconds: float, settings: ModelSettings
) -> Iterator[tuple[float, IterationModel]]:
    """Run warm-up for `seconds`; (seconds since its begin, model) whenever it was fitted anew."""
    learned = LearnedModels(settings)
    learned.hello(NODE, *EXPERTS[model])
    for iteration in warm_up.iterations():
        learned.iterations(IterationBatch(node=NODE, incarnation=1, iterations=[iteration]), warm_up.now)
        if learned.advance(warm_up.now, [NODE]):
            yield from ((warm_up.now, found) for found in learned.models([NODE]))
        if warm_up.now >= seconds:
            return


@dataclass(frozen=True, slots=True)
class Errors:
    """Mean relative errors in percent."""

    single_prefill: float
    single_decode: float
    batch_prefill: float
    batch_decode: float

    @property
    def single(self) -> float:
        return (self.single_prefill + self.single_decode) / 2

    @property
    def batch(self) -> float:
        return (self.batch_prefill + self.batch_decode) / 2


class Probe:
    """Requests and batches the model is asked about: `count` of each kind, drawn from all `requests` alike.

    Single: a request's whole prefill (in chunks) and its decode iteration, alone on a node. Batch: a prefill iteration
    over 2 to 8 waiting requests, and a decode iteration over 2 to 64 running ones.
    """

    def __init__(self, table: SiliconTable, requests: Sequence[Request], count: int, seed: int) -> None:
        draw = random.Random(seed)
        self._table = table
        self._single = [draw.choice(requests) for _ in range(count)]
        self._prefills = [[draw.choice(requests) for _ in range(draw.randint(2, 8))] for _ in range(count)]
        self._decodes = [[draw.choice(requests) for _ in range(draw.randint(2, 64))] for _ in range(count)]

    def errors(self, model: IterationModel) -> Errors:
        return Errors(
            _mean(self._prefill_s(model, [one]) for one in self._single),
            _mean(self._decode_s(model, [one]) for one in self._single),
            _mean(self._first_batch_s(model, many) for many in self._prefills),
            _mean(self._decode_s(model, many) for many in self._decodes),
        )

    def _prefill_s(self, model: IterationModel, requests: Sequence[Request]) -> tuple[float, float]:
        """(predicted, table) seconds to prefill these from beginning to end."""
        waiting = [PrefillWork(uncached + cached, cached) for uncached, cached, _ in requests]
        predicted = real = 0.0
        while (batch := compose_prefill((work for work in waiting if work.left), BATCH_TOKENS)) is not None:
            predicted += prefill_s(model, batch.terms)
            real += self._table.prefill_s(batch.terms)
            finish_prefill(batch)
        return predicted, real

    def _first_batch_s(self, model: IterationModel, requests: Sequence[Request]) -> tuple[float, float]:
        batch = compose_prefill(
            [PrefillWork(uncached + cached, cached) for uncached, cached, _ in requests], BATCH_TOKENS
        )
        assert batch is not None
        return prefill_s(model, batch.terms), self._table.prefill_s(batch.terms)

    def _decode_s(self, model: IterationModel, requests: Sequence[Request]) -> tuple[float, float]:
        terms = DecodeTerms(len(requests), sum(uncached + cached + out // 2 for uncached, cached, out in requests))
        return decode_s(model, terms), self._table.decode_s(terms)


def prefill_s(model: IterationModel, terms: PrefillTerms) -> float:
    """T_P of one iteration."""
    tokens = terms.uncached_tokens
    knee = model.c5 * max(0, tokens - model.u0)
    return model.c0 + model.c1 * tokens + model.c2 * terms.attention_pairs + model.c3 * terms.restored_tokens + knee


def decode_s(model: IterationModel, terms: DecodeTerms) -> float:
    """T_D of one iteration."""
    phi = 1.0 - (1.0 - model.expert_share) ** (model.fed_tokens * terms.requests)
    return model.d0 + model.d1 * phi + model.d2 * terms.requests + model.d3 * terms.context_tokens / MEGA


def _mean(pairs: Iterator[tuple[float, float]]) -> float:
    errors = [abs(predicted / real - 1.0) for predicted, real in pairs]
    return 100.0 * sum(errors) / len(errors)


__all__ = ["Errors", "Probe", "WarmUp", "attention_pairs", "learn", "load"]
