"""What the planner does without being asked: warm-up, the initial split, decisions, probation.

`on` orders, `dry-run` decides and says so, `off` does neither; models are learned in every mode. An order by hand ends
warm-up's hold over the phases and any trial: the operator's word stands until the next window. Between windows a split
that is plainly wrong is left early.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from schemas.kv import NodeHello
from schemas.phase import Decision, Phase, Split
from services.planner.core.candidates import Candidate
from services.planner.core.decide import Choice, Situation, choose, usable
from services.planner.core.explain import Numbers, Standing, decision_of
from services.planner.core.fleet import Node, view_of
from services.planner.core.iteration_model import LearnedModels
from services.planner.core.moves import Move, Refused, moves_for_split
from services.planner.core.options import DRY_RUN, MODES, OFF, ON, PlannerSettings
from services.planner.core.ordering import Order, Ordering
from services.planner.core.probation import Probation, Trial
from services.planner.core.throughput import NodeLimits
from services.planner.core.windows import Slice


@dataclass(frozen=True, slots=True)
class Decided:
    """A decision taken without being asked: to be published (with the time), its `order` to be carried out before."""

    decision: Decision
    order: Order | None = None


class Autopilot:
    """`mode` and `pinned` are standing orders. Ids of decisions are `run_id` and a number."""

    def __init__(self, settings: PlannerSettings, ordering: Ordering, models: LearnedModels, run_id: str) -> None:
        self.settings, self.models = settings, models
        self.mode = settings.mode
        self.pinned: set[str] = set()
        self.probation = Probation(settings.decide)
        self.by_hand = False
        self._ordering, self._run_id = ordering, run_id
        self._limits: dict[str, NodeLimits] = {}
        self._told_both: set[str] = set()
        self._initial_due = False
        self._number = 0
        self._quiet_from: float | None = None
        self._looked_at: float | None = None
        self._window_first = True
        self._avoided: dict[str, int] = {}

    def hello(self, hello: NodeHello) -> None:
        """What a node takes at most, and its experts."""
        limits = NodeLimits(hello.batch_tokens, hello.capacities.running, hello.capacities.l1_tokens)
        self._limits[hello.node] = limits
        self.models.hello(hello.node, hello.experts_per_token, hello.experts)

    def set_mode(self, mode: str) -> None:
        """The operator's word; `on` takes over from orders by hand."""
        self.mode = mode
        self.by_hand = self.by_hand and mode != ON

    def ordered_by_hand(self) -> None:
        """The operator has chosen phases."""
        self.by_hand, self._window_first, self._initial_due = True, True, False
        self.probation.end()

    def resume(self, decision: Decision, now: float) -> None:
        """Go on from the last decision of the planner before: pins, mode, frozen models, and its cool-down."""
        self.pinned = set(decision.pinned)
        if decision.mode in MODES:
            self.mode = decision.mode
        self.models.adopt(decision.models, now)
        self.by_hand = decision.kind == "hand"
        if decision.split_new is not None:
            self._quiet_from = now

    @property
    def warming_up(self) -> bool:
        """Whether nodes are kept at both phases now."""
        return self.mode == ON and self.settings.warm_up and self.models.warming_up and not self.by_hand

    def switch_ended(self, ended_at: float) -> None:
        """The cool-down runs from here."""
        self._quiet_from = ended_at if self._quiet_from is None else max(ended_at, self._quiet_from)

    def act(self, windows: Sequence[Sequence[Slice]], latest: Sequence[Slice], now: float) -> list[Decided]:
        """Everything that is due: a failed trial first, then warm-up, then the windows that have closed.

        `latest`: the last slices, at most `early_slices` of them; looked at between windows.
        """
        nodes = self._ordering.fleet.live()
        failed = self.probation.look(nodes, now)
        decided: list[Decided] = []
        if failed is not None and self.mode == ON:
            decided += self._revert(failed, nodes, now)
        if self.warming_up:
            decided += self._warm_up(nodes, now)
        elif self._initial_due and self.mode == ON:
            decided += self._initial(nodes, now)
        for window in windows:
            if self.mode != OFF and not self.warming_up:
                decided.append(self._window(window, now))
        if not decided and self.mode == ON and not self.models.warming_up:
            decided += self._early(latest, nodes, now)
        return decided

    def _warm_up(self, nodes: Sequence[Node], now: float) -> list[Decided]:
        """Each node is told once to run both phases; when the models are there the initial split follows."""
        self._initial_due = len(nodes) > 1
        moves = [
            Move(node.name, node.phase, Phase.BOTH)
            for node in nodes
            if node.phase is not Phase.BOTH and node.name not in self.pinned | self._told_both
        ]
        if not moves or len(nodes) < 2:
            return []
        self._told_both |= {move.node for move in moves}
        return [self._order(moves, "warm-up", "warm-up: every node runs both phases until its times are known", now)]

    def _initial(self, nodes: Sequence[Node], now: float) -> list[Decided]:
        self._initial_due = False
        target = default_split(len(nodes))
        if self.settings.initial_split is not None:
            wanted = Split.parse(self.settings.initial_split)
            target = wanted if wanted.prefill + wanted.decode == len(nodes) else target
        end = "after the limit, with errors above the target" if self.models.late else "errors are below the target"
        why = f"warm-up ended after {self.models.warm_up_s(now):.0f} s, {end}: initial split {target}"
        try:
            moves = moves_for_split(nodes, target, self.pinned)
        except Refused as refused:
            return [self._say("initial", f"{why}: refused, {refused}")]
        return [self._order(moves, "initial", why, now)]

    def _window(self, window: Sequence[Slice], now: float) -> Decided:
        nodes = self._ordering.fleet.live()
        self._avoided = {split: left - 1 for split, left in self._avoided.items() if left > 1}
        numbers = Numbers.of(window, self.settings.window.slice_s)
        busy = self._busy(now)
        if self.models.warming_up:
            busy = "the iteration times are still being learned"
        if busy:
            return self._say("window", f"hold: {busy}", numbers=numbers)
        self._window_first = False
        choice = choose(self._situation(window, nodes), self.settings.decide)
        if choice.chosen is None:
            return self._say("window", choice.why, choice=choice, numbers=numbers)
        if self.mode == DRY_RUN:
            split = str(choice.chosen.split)
            return self._say("window", f"dry-run: {choice.why}", split, choice=choice, numbers=numbers)
        return self._switch("window", choice, choice.chosen, numbers, now)

    def _early(self, latest: Sequence[Slice], nodes: Sequence[Node], now: float) -> list[Decided]:
        """A split that is plainly wrong is left as soon as a few slices show it; otherwise nothing is said.

        Not before a first window: a cluster that has just begun computes prompts that nobody will bring again.
        """
        settings = self.settings.decide
        due = bool(latest) and latest[-1].start != self._looked_at and len(usable(latest)) == settings.early_slices
        if not due or self._window_first or self._busy(now):
            return []
        self._looked_at = latest[-1].start
        choice = choose(self._situation(latest, nodes), settings, early=True)
        if choice.chosen is None:
            return []
        return [self._switch("early", choice, choice.chosen, Numbers.of(latest, self.settings.window.slice_s), now)]

    def _switch(self, kind: str, choice: Choice, chosen: Candidate, numbers: Numbers, now: float) -> Decided:
        decided = self._order(chosen.moves, kind, choice.why, now, choice=choice, numbers=numbers)
        if self.settings.decide.safe_switch and choice.expected is not None and decided.order is not None:
            named = (decided.decision.id, decided.order.split_now, decided.order.split_new)
            self.probation.begin(named, chosen.moves, choice.expected, now)
        return decided

    def _busy(self, now: float) -> str:
        """Why no switch may begin now; "" if it may."""
        if self._ordering.under_way(now):
            return "a switch is under way"
        cooldown_s = self.settings.decide.cooldown_s
        if self._quiet_from is not None and now - self._quiet_from < cooldown_s:
            return f"the last switch ended {now - self._quiet_from:.0f} s ago, cool-down {cooldown_s:g} s"
        return ""

    def _situation(self, window: Sequence[Slice], nodes: Sequence[Node]) -> Situation:
        models = self.models.models(node.name for node in nodes)
        known = {model.node: model for model in models if model.prefill_windows and model.decode_windows}
        slice_s = self.settings.window.slice_s
        return Situation(nodes, known, self._limits, self.pinned, window, slice_s, self._avoided.keys())

    def _revert(self, trial: Trial, nodes: Sequence[Node], now: float) -> list[Decided]:
        """Send the same nodes back, as far as they still are where the switch sent them."""
        phases = {node.name: node.phase for node in nodes}
        moves = [
            Move(move.node, move.new, move.old)
            for move in trial.moves
            if phases.get(move.node) is move.new and move.node not in self.pinned
        ]
        new = {move.node: move.new for move in moves}
        after = view_of(new.get(name, phase) for name, phase in phases.items())
        why = f"decision {trial.decision_id} undone on probation: {trial.seen}"
        self._avoided[trial.split_now] = self.settings.decide.reverted_windows
        if not moves or 0 in (after.serving(Phase.PREFILL), after.serving(Phase.DECODE)):
            return [self._say("revert", f"{why}; its nodes cannot go back")]
        return [self._order(moves, "revert", why, now)]

    def _order(
        self,
        moves: Sequence[Move],
        kind: str,
        why: str,
        now: float,
        *,
        choice: Choice | None = None,
        numbers: Numbers | None = None,
    ) -> Decided:
        self.probation.end()
        order = self._ordering.order(moves, self._next_id(), now)
        decision = decision_of(
            order.decision_id,
            kind,
            why,
            self.standing(),
            split_now=order.split_now,
            split_new=order.split_new if order.commands else None,
            order=order,
            choice=choice,
            numbers=numbers,
        )
        return Decided(decision, order if order.commands else None)

    def _say(
        self,
        kind: str,
        why: str,
        split_new: str | None = None,
        *,
        choice: Choice | None = None,
        numbers: Numbers | None = None,
    ) -> Decided:
        """A decision that changes nothing."""
        now = str(self._ordering.fleet.split())
        standing = self.standing()
        return Decided(
            decision_of(
                self._next_id(),
                kind,
                why,
                standing,
                split_now=now,
                split_new=split_new,
                choice=choice,
                numbers=numbers,
            )
        )

    def standing(self) -> Standing:
        """What the planner after us takes over."""
        names = [node.name for node in self._ordering.fleet.live()]
        frozen = [model for model in self.models.models(names) if model.frozen]
        return Standing(sorted(self.pinned), self.mode, frozen)

    def _next_id(self) -> str:
        self._number += 1
        return f"{self._run_id}-{self._number}"

    def check(self) -> None:
        self.probation.check()
        self.models.check()
        assert self.mode in MODES
        assert all(left > 0 for left in self._avoided.values())


def default_split(nodes: int) -> Split:
    """Two thirds of the nodes prefill, each phase at least one."""
    return Split(max(1, min(nodes - 1, 2 * nodes // 3)), nodes - max(1, min(nodes - 1, 2 * nodes // 3)))
