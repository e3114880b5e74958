"""What the planner's policy can be told: every number and every improvement over the plain rules is a setting."""

from dataclasses import dataclass, field
from typing import Annotated

import msgspec
from msgspec import Meta

from services.planner.core.windows import WindowSettings

ON, OFF, DRY_RUN = "on", "off", "dry-run"
MODES = (ON, OFF, DRY_RUN)
Above = Annotated[float, Meta(gt=0, le=1e9)]
NotBelow0 = Annotated[float, Meta(ge=0, le=1e9)]
Share = Annotated[float, Meta(ge=0, lt=1)]
Count = Annotated[int, Meta(ge=1)]


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How the iteration-time models are learned. A row is `row_s` of one node; a node's fit keeps `rows_kept` of them.

    Warm-up ends when the mean relative error on the `newest` rows of each phase is below `target_error`, not before
    `warm_up_least_s` and not after `warm_up_limit_s` of work. `optional_terms`: c4, c5 (knees tried: `knee_tokens`) and
    d3 may be added where they lower the held-out error. `experts_per_token`, `experts`: k and E where nodes do not say
    them.
    """

    row_s: Above = 1.0
    rows_kept: Count = 1800
    newest: Count = 10
    target_error: Above = 0.07
    warm_up_least_s: NotBelow0 = 60.0
    warm_up_limit_s: Above = 1800.0
    refit_s: Above = 5.0
    optional_terms: bool = True
    knee_tokens: tuple[Count, ...] = (256, 512, 1024, 2048, 4096, 8192)
    experts_per_token: Annotated[int, Meta(ge=0)] = 0
    experts: Annotated[int, Meta(ge=0)] = 0


class DecideSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a split is chosen. Durations in seconds, gains and effects as shares.

    `closed_loop`: each candidate's throughput is the fixed point X = N/(Z + R_P(X) + R_D(X)); off: Theta with q as
    measured under the split now. `latency_slack`: among splits whose throughput is within this share of the best, a
    better P95 TTFT may outweigh throughput: halving it is worth `latency_weight` * 69 % of it (0.015: 1 %; from 1 on
    latency alone counts). With `ttft_target_s`, `tpot_target_s` nothing is given for more than the target, and missing
    one weighs `target_weight`. Slack 0: throughput alone.
    `by_start`: a slice tells the work of the requests that began in it; off: of those that ended (see `starts`).
    `safe_switch`: corrected test over all candidates (chance of any wrong one: `family_error`), a gain of at least
    `min_effect`, the donor pool re-predicted with its queued work (which must drain in `donor_wait_s`), and probation;
    off: mean > `stderrs` standard errors alone. On probation, `probation_s` long, a queue that is `probation_sigmas`
    deviations above what it was in `probation_ticks` ticks in a row undoes the switch; what was undone is not tried
    for `reverted_windows`.
    `early_slices`: between windows the last so many slices (0: off) may order a split whose gain in each of them is
    above `early_effect`. `drain_wait_s`: an answer that a switch leaves on its node for longer is load like any other,
    and keeps neither slices nor the next switch waiting (from 600 on: it always does, until the switch is given up).
    """

    stderrs: Above = 2.0
    cooldown_s: NotBelow0 = 120.0
    closed_loop: bool = True
    by_start: bool = True
    latency_slack: Share = 0.05
    latency_weight: NotBelow0 = 0.015
    target_weight: NotBelow0 = 1.0
    ttft_target_s: Above | None = None
    tpot_target_s: Above | None = None
    safe_switch: bool = True
    family_error: Annotated[float, Meta(gt=0, lt=1)] = 0.05
    min_effect: Share = 0.02
    donor_wait_s: Above = 30.0
    probation_s: Above = 120.0
    probation_tick_s: Above = 5.0
    probation_ticks: Count = 3
    probation_sigmas: Above = 4.0
    reverted_windows: Count = 3
    early_slices: Annotated[int, Meta(ge=0)] = 4
    early_effect: Share = 0.2
    drain_wait_s: Above = 120.0


@dataclass(frozen=True, slots=True)
class PlannerSettings:
    """Durations in seconds. `settle_s`: how long after a switch requests that ended in it may still be reported.

    `mode`: until a stored decision or an order says otherwise. `warm_up`: in mode on, nodes run both phases until the
    models are there. `initial_split`: ordered then; None, or one of another size: two thirds of the nodes prefill.
    """

    node_timeout_s: float = 3.0
    switch_timeout_s: float = 600.0
    settle_s: float = 0.2
    block_size: int = 16
    window: WindowSettings = field(default_factory=WindowSettings)
    mode: str = OFF
    initial_split: str | None = None
    warm_up: bool = True
    model: ModelSettings = field(default_factory=ModelSettings)
    decide: DecideSettings = field(default_factory=DecideSettings)
