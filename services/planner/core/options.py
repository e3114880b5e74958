"""What the planner's policy can be told: every number and every improvement over the plain rules is a setting."""

from dataclasses import dataclass, field

from services.planner.core.windows import WindowSettings

ON, OFF, DRY_RUN = "on", "off", "dry-run"
MODES = (ON, OFF, DRY_RUN)


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """How the iteration-time models are learned. A row is `row_s` of one node; a node's fit keeps `rows_kept` of them.

    Warm-up ends when the mean relative error on the `newest` rows of each phase is below `target_error`, not before
    `warm_up_least_s` and not after `warm_up_limit_s` of work. `optional_terms`: c5 (knees tried: `knee_tokens`) and d3
    may be added where they lower the held-out error. `experts_per_token`, `experts`: k and E where nodes do not say
    them.
    """

    row_s: float = 1.0
    rows_kept: int = 1800
    newest: int = 10
    target_error: float = 0.07
    warm_up_least_s: float = 60.0
    warm_up_limit_s: float = 1800.0
    refit_s: float = 5.0
    optional_terms: bool = True
    knee_tokens: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 8192)
    experts_per_token: int = 0
    experts: int = 0


@dataclass(frozen=True, slots=True)
class DecideSettings:
    """How a split is chosen. Durations in seconds, gains and effects as shares.

    `closed_loop`: each candidate's throughput is the fixed point X = N/(Z + R_P(X) + R_D(X)); off: Theta with q as
    measured under the split now. `latency_slack`: among splits whose throughput is within this share of the best, the
    one with the best predicted P95 TTFT (or the first that meets `ttft_target_s` and `tpot_target_s`) is taken; 0: off.
    `safe_switch`: corrected test over all candidates, `min_effect`, the donor pool re-predicted with its queued work,
    and probation; off: mean > `stderrs` standard errors alone.
    """

    stderrs: float = 2.0
    cooldown_s: float = 120.0
    closed_loop: bool = True
    latency_slack: float = 0.05
    ttft_target_s: float | None = None
    tpot_target_s: float | None = None
    safe_switch: bool = True
    family_error: float = 0.05
    min_effect: float = 0.03
    donor_wait_s: float = 30.0
    probation_s: float = 120.0
    probation_tick_s: float = 5.0
    probation_ticks: int = 3
    probation_sigmas: float = 4.0


@dataclass(frozen=True, slots=True)
class PlannerSettings:
    """Durations in seconds. `settle_s`: how long after a switch requests that ended in it may still be reported.

    `mode`: until a stored decision or an order says otherwise. `initial_split`: ordered when warm-up ends; None: the
    best by the models. `warm_up`: in mode on, nodes run both phases until the models are there.
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
