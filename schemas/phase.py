"""Phases, splits, and the planner's commands, states, queries and decisions."""

import re
from enum import StrEnum

import msgspec

from schemas.codec import Count, Decoder, Message, Seconds, UnixTime
from schemas.iteration_model import IterationModel

_SPLIT = re.compile(r"(\d{1,6})P(\d{1,6})D\Z")


class Phase(StrEnum):
    """What kind of request the router sends a node; never a property of the process."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"

    def serves(self, other: "Phase") -> bool:
        """Whether a node of this phase takes requests of phase `other` (prefill or decode)."""
        return self is Phase.BOTH or self is other


class SwitchState(StrEnum):
    SERVING = "serving"
    DRAINING = "draining"
    SWITCHED = "switched"


class Split(msgspec.Struct, frozen=True):
    """How many nodes run each phase, written 4P5D."""

    prefill: Count
    decode: Count

    @classmethod
    def parse(cls, text: str) -> "Split":
        """Read `4P5D`; ValueError otherwise."""
        match = _SPLIT.match(text.strip().upper())
        if match is None:
            raise ValueError(f"split {text!r} is not of the form 4P5D")
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.prefill}P{self.decode}D"


class PhaseCommand(Message, frozen=True, kw_only=True):
    """`phase.command`: durable, last per node kept. A node obeys only an epoch above its own."""

    id: str
    t: UnixTime
    node: str
    phase: Phase
    epoch: Count
    reason: str
    decision_id: str


class PhaseState(Message, frozen=True, kw_only=True):
    """`phase.state`: a node's answer to a command. `took_s` runs from receipt of the command on the node's own clock
    to the end of its last request of the old phase; `moved` counts waiting requests given back to their routers."""

    id: str
    t: UnixTime
    node: str
    phase: Phase
    epoch: Count
    state: SwitchState
    took_s: Seconds | None = None
    moved: Count = 0
    longest_running_s: Seconds | None = None
    decision_id: str = ""


class PlannerQuery(Message, frozen=True, kw_only=True):
    """`query.planner.<verb>`: split wants `split`; phase wants `node` and `phase`; pin wants `node` and `pinned`;
    mode wants `mode` (on, off, dry-run); status wants nothing."""

    split: str | None = None
    node: str | None = None
    phase: Phase | None = None
    pinned: bool | None = None
    mode: str | None = None
    reason: str = "by hand"


class SwitchedNode(msgspec.Struct, frozen=True, kw_only=True):
    node: str
    old: Phase
    new: Phase
    epoch: Count
    took_s: Seconds | None
    moved: Count
    longest_running_s: Seconds | None = None


class PlannerReply(Message, frozen=True, kw_only=True):
    """The planner's answer: `ok` False with `error` naming value and limit, else what was done and what it cost.

    `open_orders`: orders it works on now.
    """

    ok: bool
    error: str = ""
    split_now: str = ""
    mode: str = ""
    pinned: list[str] = []
    decision_id: str = ""
    nodes: list[SwitchedNode] = []
    took_s: Seconds | None = None
    moved: Count = 0
    lost_tokens: Count = 0
    failed: Count = 0
    open_orders: Count = 0


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Mean work of one request: tokens (uncached, cached, output, accepted per iteration), query-key pairs, and media
    that are encoded."""

    t_uc: float
    t_c: float
    attention_pairs: float
    t_out: float
    t_acc: float
    media: float = 0.0


class CandidateVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """One split that was considered. `gains` per usable slice, Theta_cand/Theta_now - 1; it passes when `mean` is above
    `threshold`, which is the stated number of standard errors and at least the minimum effect.

    `throughput_rps`, `ttft_p95_s`, `tpot_s`: predicted for it, mean over the slices. `nodes`: those that would switch.
    `why`: what kept it from being chosen, or why it was.
    """

    split: str
    gains: list[float] = []
    mean: float | None = None
    stderr: float | None = None
    threshold: float | None = None
    passes: bool = False
    throughput_rps: float | None = None
    ttft_p95_s: float | None = None
    tpot_s: float | None = None
    nodes: list[str] = []
    why: str = ""


class Decision(Message, frozen=True, kw_only=True):
    """`planner.decision`: what was decided and every number behind it.

    `gains`, `mean`, `stderr` and `threshold` are those of the split chosen, else of the best one; `verdicts` has all.
    `pinned` and `mode` are the planner's standing orders after it; a planner that starts takes them from the last one,
    and the frozen `models` too. `kind`: hand, pin, mode, warm-up, initial, window, early, revert. `slices`: kinds of
    the window's slices, oldest first. `think_s`, `agents`: what the closed loop was solved with.
    """

    id: str
    t: UnixTime
    split_now: str
    split_new: str | None = None
    gains: list[float] = []
    mean: float | None = None
    stderr: float | None = None
    threshold: float | None = None
    candidates: list[str] = []
    workload: Workload | None = None
    q: float | None = None
    applied: bool
    why: str
    nodes: list[str] = []
    pinned: list[str] = []
    mode: str = ""
    kind: str = ""
    verdicts: list[CandidateVerdict] = []
    slices: list[str] = []
    think_s: float | None = None
    agents: float | None = None
    models: list[IterationModel] = []


PHASE_COMMAND = Decoder(PhaseCommand)
PHASE_STATE = Decoder(PhaseState)
PLANNER_QUERY = Decoder(PlannerQuery)
PLANNER_REPLY = Decoder(PlannerReply)
DECISION = Decoder(Decision)
