"""A decision in the words of the wire: every number it was taken on."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from schemas.iteration_model import IterationModel
from schemas.phase import CandidateVerdict, Decision, Workload
from services.planner.core.decide import Choice, usable
from services.planner.core.ordering import Order
from services.planner.core.windows import Slice


@dataclass(frozen=True, slots=True)
class Numbers:
    """The window behind a decision: kinds of its slices, and means over the usable ones."""

    slices: list[str] = field(default_factory=list)
    workload: Workload | None = None
    q: float | None = None
    think_s: float | None = None
    agents: float | None = None

    @classmethod
    def of(cls, window: Sequence[Slice], slice_s: float) -> "Numbers":
        """Averaged slice by slice, as the decision averages them."""
        kinds = [one.kind.value for one in window]
        known = usable(window)
        if not known:
            return cls(kinds)
        works = [one.workload for one in known if one.workload is not None]
        demands = [one.demand for one in known if one.demand is not None]
        rows = np.array([(w.t_uc, w.t_c, w.attention_pairs, w.t_out, w.t_acc, w.media) for w in works])
        t_uc, t_c, pairs, t_out, t_acc, media = (float(value) for value in rows.mean(axis=0))
        return cls(
            kinds,
            Workload(t_uc=t_uc, t_c=t_c, attention_pairs=pairs, t_out=t_out, t_acc=t_acc, media=media),
            float(np.mean([one.q for one in known])),
            float(np.mean([demand.think_s for demand in demands])),
            float(np.mean([one.agents(slice_s) for one in known])),
        )


@dataclass(frozen=True, slots=True)
class Standing:
    """What outlives a planner: pins, mode and frozen models."""

    pinned: list[str]
    mode: str
    models: list[IterationModel]


def decision_of(
    key: str,
    kind: str,
    why: str,
    standing: Standing,
    *,
    split_now: str,
    split_new: str | None = None,
    order: Order | None = None,
    choice: Choice | None = None,
    numbers: Numbers | None = None,
) -> Decision:
    """`planner.decision` without its time, which the sender fills in. `order` is set when it is carried out."""
    numbers = numbers or Numbers()
    best: CandidateVerdict | None = choice.best if choice is not None else None
    return Decision(
        id=key,
        t=0.0,
        kind=kind,
        split_now=split_now,
        split_new=split_new,
        gains=best.gains if best is not None else [],
        mean=best.mean if best is not None else None,
        stderr=best.stderr if best is not None else None,
        threshold=best.threshold if best is not None else None,
        candidates=[verdict.split for verdict in choice.verdicts] if choice is not None else [],
        verdicts=choice.verdicts if choice is not None else [],
        workload=numbers.workload or (order.workload if order is not None else None),
        q=numbers.q if numbers.q is not None else (order.q if order is not None else None),
        think_s=numbers.think_s,
        agents=numbers.agents,
        slices=numbers.slices,
        applied=order is not None,
        why=why,
        nodes=[command.node for command in order.commands] if order is not None else [],
        pinned=standing.pinned,
        mode=standing.mode,
        models=standing.models,
    )
