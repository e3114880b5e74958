"""Systems that are the product with something of it off or other: the reference's own rules, and a fixed split."""

from services.planner.core.options import DecideSettings
from services.simulator.systems.own import Own, OwnSettings

PLAIN_RULES = DecideSettings(
    closed_loop=False, by_start=False, latency_slack=0.0, safe_switch=False, early_slices=0, drain_wait_s=600.0
)
"""Mean gain above two standard errors, Theta with q as measured, the largest mean wins."""


def reference() -> Own:
    """The reference's rules: its planner's test and throughput formula, its TTFT routing, decode in turn.

    Approximate: fetch and duplicate cost and a rule for decode are not public (ours, round robin); blocks carry ours of
    the directory's values; a node that goes to prefill keeps its host copies, where the reference empties them.
    """
    return Own(OwnSettings(decide=PLAIN_RULES, decode_in_turn=True), id="reference")


def static_own() -> Own:
    """Our engines, pool, eviction and routing on a fixed split; models are learned for the router."""
    return Own(OwnSettings(planner=False), id="static-own")


def ours_for_ttft(target_s: float) -> Own:
    """Ours with a target for P95 TTFT: nothing is given for more than that, and missing it weighs."""
    return Own(OwnSettings(decide=DecideSettings(ttft_target_s=target_s)), id=f"ours-ttft-{target_s:g}")
