"""The decision at the end of a window: every candidate's gain in each slice, the test, and which split is chosen.

The rule of the reference: a candidate passes when the mean of Theta_cand/Theta_now - 1 over the slices is above two
standard errors, and the passing one with the largest mean is taken. What goes further can be switched off
(`DecideSettings`): the closed loop, the choice by latency within a slack of the best throughput, and the safe switch.
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import msgspec
import numpy as np

from schemas.iteration_model import IterationModel
from schemas.phase import CandidateVerdict, Phase, Split
from services.planner.core.candidates import Candidate, candidates, masks
from services.planner.core.closed_loop import Outlook, solve
from services.planner.core.fleet import Node
from services.planner.core.model_rows import Matrix
from services.planner.core.options import DecideSettings
from services.planner.core.probation import Expected
from services.planner.core.significance import Tested, corrected_test, every_slice_test, plain_test
from services.planner.core.throughput import NodeLimits, NodeTimes, Works, theta
from services.planner.core.windows import Slice, SliceKind

LEAST_SLICES = 2
_SMALLEST = 1e-9
_PASSES = "passes, another is better"


@dataclass(frozen=True, slots=True)
class Situation:
    """What a decision is taken on: live nodes in order of name, their models and limits, and the window's slices."""

    nodes: Sequence[Node]
    models: Mapping[str, IterationModel]
    limits: Mapping[str, NodeLimits]
    pinned: AbstractSet[str]
    slices: Sequence[Slice]
    slice_s: float
    avoided: AbstractSet[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Choice:
    """The split to order, None to stay, and why; `verdicts` has every candidate, `best` is the one it was about.
    `expected` is what was predicted for the chosen one, for its probation."""

    why: str
    chosen: Candidate | None = None
    verdicts: list[CandidateVerdict] = field(default_factory=list)
    best: CandidateVerdict | None = None
    expected: Expected | None = None


@dataclass(frozen=True, slots=True)
class _Table:
    """Candidates (the split now first) by slices: throughput, and the outlook of the closed loop."""

    listed: list[Candidate]
    rate: Matrix
    outlook: Outlook
    collocated: bool

    def row(self, values: Matrix, index: int) -> float:
        return float(values[index].mean())


def usable(slices: Sequence[Slice]) -> list[Slice]:
    """Slices that say what the work was: not unknown, idle or under a switch, and with requests in decode."""
    return [s for s in slices if s.kind is SliceKind.KNOWN and s.workload is not None and s.q]


def choose(situation: Situation, settings: DecideSettings, *, early: bool = False) -> Choice:
    """The decision for one window; `early`: for the last slices of one that goes on."""
    nodes = situation.nodes
    slices = usable(situation.slices)
    now = _now(nodes)
    missing = [node.name for node in nodes if node.name not in situation.models]
    if len(nodes) < 2:
        return Choice(f"hold: {len(nodes)} node, nothing to split")
    if missing:
        return Choice(f"hold: no models of {', '.join(missing)} yet")
    if len(slices) < LEAST_SLICES:
        counts = ", ".join(f"{sum(s.kind is kind for s in situation.slices)} {kind}" for kind in SliceKind)
        return Choice(f"hold: {len(slices)} usable slices, {LEAST_SLICES} are needed ({counts})")
    others = [found for found in candidates(nodes, situation.pinned) if found.moves]
    if not others:
        return Choice("hold: no other split can be made, the pinned nodes do not let it")
    table = _table(situation, slices, [now, *others], settings)
    return _judged(table, situation, settings, early=early)


def _now(nodes: Sequence[Node]) -> Candidate:
    phases = tuple(node.phase for node in nodes)
    return Candidate(Split(phases.count(Phase.PREFILL), phases.count(Phase.DECODE)), (), phases)


def _table(situation: Situation, slices: Sequence[Slice], listed: list[Candidate], settings: DecideSettings) -> _Table:
    works = Works.of(slices, situation.slice_s)
    times = NodeTimes.of(
        [situation.models[node.name] for node in situation.nodes],
        [situation.limits.get(node.name, NodeLimits()) for node in situation.nodes],
    )
    prefill, decode = masks([candidate.phases for candidate in listed])
    outlook = solve(times, works, prefill, decode)
    collocated = bool((prefill[0] * decode[0]).any())
    rate = outlook.rate if settings.closed_loop and not collocated else theta(times, works, prefill, decode)
    return _Table(listed, np.maximum(rate, _SMALLEST), outlook, collocated)


def _judged(table: _Table, situation: Situation, settings: DecideSettings, *, early: bool) -> Choice:
    value = _value(table, settings)
    gains = np.exp(value[1:] - value[:1]) - 1.0
    if early:
        tested = every_slice_test(gains, settings.early_effect)
    elif settings.safe_switch:
        tested = corrected_test(gains, settings.stderrs, settings.family_error, settings.min_effect)
    else:
        tested = plain_test(gains, settings.stderrs)
    mean_rate = table.rate.mean(axis=1)
    near = mean_rate >= (1.0 - (settings.latency_slack or 1.0)) * mean_rate.max()
    verdicts: list[CandidateVerdict] = []
    for index, test in enumerate(tested, start=1):
        reason = _against(table, index, test, situation, settings, near=bool(near[index]))
        verdicts.append(_verdict(table, index, gains[index - 1], test, reason))
    allowed = [index for index, verdict in enumerate(verdicts, start=1) if verdict.why == _PASSES]
    if not allowed:
        leader = max(verdicts, key=lambda verdict: verdict.mean or 0.0)
        return Choice(f"hold: best is {leader.split}, {leader.why}", None, _with_now(table, verdicts), leader)
    index = max(allowed, key=lambda index: tested[index - 1].mean)
    test = tested[index - 1]
    picked = verdicts[index - 1] = msgspec.structs.replace(verdicts[index - 1], why="chosen")
    p95 = table.row(table.outlook.ttft_p95_s, 0), table.row(table.outlook.ttft_p95_s, index)
    why = (
        f"gain {test.mean:+.1%} is above {test.threshold:.1%} over {gains.shape[1]} slices: throughput "
        f"{mean_rate[0]:.3g} -> {mean_rate[index]:.3g} req/s, P95 TTFT {p95[0]:.3g} -> {p95[1]:.3g} s"
    )
    expected = Expected(
        _capacity(table, 0),
        _capacity(table, index),
        table.row(table.outlook.ttft_s, index),
        table.row(table.outlook.running, index),
    )
    return Choice(why, table.listed[index], _with_now(table, verdicts), picked, expected)


def _value(table: _Table, settings: DecideSettings) -> Matrix:
    """What is maximised, (c, s): ln X, and the latencies as far as they are weighed. Differences are relative gains."""
    value: Matrix = np.log(table.rate)
    if not settings.latency_slack or table.collocated:
        return value
    ttft, tpot = np.maximum(table.outlook.ttft_p95_s, _SMALLEST), np.maximum(table.outlook.tpot_s, _SMALLEST)
    value = value - settings.latency_weight * np.log(np.maximum(ttft, settings.ttft_target_s or _SMALLEST))
    for seconds, target in ((ttft, settings.ttft_target_s), (tpot, settings.tpot_target_s)):
        if target is not None:
            value = value - settings.target_weight * np.log(np.maximum(1.0, seconds / target))
    return value


def _capacity(table: _Table, index: int) -> float:
    """Requests per second that the prefill nodes of a candidate can do."""
    return table.row(table.outlook.rate / np.maximum(table.outlook.prefill_load, _SMALLEST), index)


def _against(
    table: _Table, index: int, test: Tested, situation: Situation, settings: DecideSettings, *, near: bool
) -> str:
    """Why this candidate is not taken; "" if it may be."""
    if not test.passes:
        return f"gain {test.mean:+.1%} is not above {test.threshold:.1%}"
    if not near:
        return f"its throughput is more than {settings.latency_slack:.0%} below the best"
    if str(table.listed[index].split) in situation.avoided:
        return "it was undone on probation a short while ago"
    return _donors(table, index, situation, settings.donor_wait_s) if settings.safe_switch else ""


def _donors(table: _Table, index: int, situation: Situation, budget_s: float) -> str:
    """The pool that gives nodes, re-predicted with the work that waits there now."""
    outlook, candidate = table.outlook, table.listed[index]
    if table.row(outlook.ttft_p95_s, index) <= table.row(outlook.ttft_p95_s, 0):
        return ""
    left = [node for node, phase in zip(situation.nodes, candidate.phases, strict=True) if phase is Phase.PREFILL]
    gives_prefill = any(move.old is Phase.PREFILL for move in candidate.moves)
    if gives_prefill:
        load = table.row(outlook.prefill_load, index)
        waiting = sum(node.waiting for node in situation.nodes if node.phase.serves(Phase.PREFILL))
        drain_s = waiting / _capacity(table, index) / max(0.02, 1.0 - load)
        if drain_s > budget_s:
            return f"{waiting} waiting requests would take {drain_s:.0f} s to drain on {len(left)} prefill nodes"
    decoding = sum(node.running_decode for node in situation.nodes)
    room = table.row(outlook.room, index) * (len(situation.nodes) - len(left))
    if not gives_prefill and decoding > room:
        return f"{decoding} requests decode now, the {len(situation.nodes) - len(left)} nodes left hold {room:.0f}"
    return ""


def _verdict(table: _Table, index: int, gains: Matrix, test: Tested, reason: str) -> CandidateVerdict:
    return CandidateVerdict(
        split=str(table.listed[index].split),
        gains=[float(gain) for gain in gains],
        mean=test.mean,
        stderr=test.stderr,
        threshold=test.threshold,
        passes=test.passes,
        throughput_rps=table.row(table.rate, index),
        ttft_p95_s=table.row(table.outlook.ttft_p95_s, index),
        tpot_s=table.row(table.outlook.tpot_s, index),
        nodes=table.listed[index].nodes,
        why=reason or _PASSES,
    )


def _with_now(table: _Table, verdicts: list[CandidateVerdict]) -> list[CandidateVerdict]:
    """The split now, whose gain is 0 by definition, before the others."""
    now = CandidateVerdict(
        split=str(table.listed[0].split),
        throughput_rps=table.row(table.rate, 0),
        ttft_p95_s=table.row(table.outlook.ttft_p95_s, 0),
        tpot_s=table.row(table.outlook.tpot_s, 0),
        why="the split now",
    )
    return [now, *verdicts]
