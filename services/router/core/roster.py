"""All nodes as arrays, one row each, so that a placement looks at 64 of them at once.

A row is written anew when something about its node changes; liveness alone follows from the time. Rows are in order of
name.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from schemas.directory import MatchReply
from schemas.phase import Phase
from services.router.core.nodes import Node
from services.router.core.timing import Coefficients

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
SPECULATION = 0.6
"""Share of the tokens fed to a speculative decode iteration that are accepted, for want of a measured one."""


@dataclass(slots=True)
class PrefillRows:
    """Coefficients of the prefill model and use of the host pool, each of shape (nodes).

    c0 is spread over the tokens of an iteration (`c0_share`, c0/nu) or, where nu is unknown, charged per request;
    `c0_whole` and `per_nu` (1/nu) are 0 there.
    """

    c0_share: Floats
    c0_each: Floats
    c0_whole: Floats
    per_nu: Floats
    c1: Floats
    c2: Floats
    c3: Floats
    c4: Floats
    c5: Floats
    u0: Floats
    total: Floats
    used: Floats
    referenced: Floats
    free: Floats

    @classmethod
    def empty(cls, count: int) -> "PrefillRows":
        return cls(*(np.zeros(count) for _ in range(14)))


@dataclass(slots=True)
class DecodeRows:
    """Coefficients of the decode model and what a node holds, each of shape (nodes); inf where a limit is unknown.

    phi(B) = 1 - exp(B * `untouched`); `per_token` is iterations a token of the answer.
    """

    d0: Floats
    d1: Floats
    d2: Floats
    d3: Floats
    untouched: Floats
    per_token: Floats
    capacity: Floats
    limit: Floats

    @classmethod
    def empty(cls, count: int) -> "DecodeRows":
        return cls(*(np.zeros(count) for _ in range(8)))


class Holders:
    """Who holds what of one prompt, by row: leading blocks on the device and in host memory of each node of a match."""

    __slots__ = ("l1_blocks", "l2_blocks", "rows")

    def __init__(self, match: MatchReply, index: Mapping[str, int]) -> None:
        found = [(row, node) for node in match.nodes if (row := index.get(node.node)) is not None]
        self.rows = np.array([row for row, _ in found], np.intp)
        self.l1_blocks = np.array([node.l1_blocks for _, node in found], float)
        self.l2_blocks = np.array([node.l2_blocks for _, node in found], float)


class Roster:
    """`names` by row and `index` of each. `serves` says who takes legs of a phase, `accepted` whose KV may be used;
    both leave liveness aside."""

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ()
        self.index: dict[str, int] = {}
        self._nodes: dict[str, tuple[Node, Coefficients]] = {}
        self._resize()

    def __len__(self) -> int:
        return len(self.names)

    def put(self, node: Node, model: Coefficients) -> None:
        """A node that is new, or about which something changed."""
        new = node.name not in self._nodes
        self._nodes[node.name] = (node, model)
        if new:
            self._resize()
        else:
            self._write(self.index[node.name])

    def alive(self, now: float, timeout_s: float, grace_from: float, *, suspended: bool) -> Mask:
        """Who was heard within the timeout (all that ever were, while the bus is gone)."""
        if suspended:
            return self.known.copy()
        heard = np.maximum(self.heard, grace_from)
        alive: Mask = self.known & (now - heard <= timeout_s)
        return alive

    def _resize(self) -> None:
        self.names = tuple(sorted(self._nodes))
        self.index = {name: row for row, name in enumerate(self.names)}
        count = len(self.names)
        self.prefill, self.decode = PrefillRows.empty(count), DecodeRows.empty(count)
        self.knees = False
        self.heard = np.full(count, float("-inf"))
        self.known, self.accepted = np.zeros(count, bool), np.zeros(count, bool)
        self.serves = {phase: np.zeros(count, bool) for phase in (Phase.PREFILL, Phase.DECODE)}
        for row in range(count):
            self._write(row)

    def _write(self, row: int) -> None:
        node, model = self._nodes[self.names[row]]
        self.heard[row] = node.heard
        self.known[row] = node.telemetry is not None
        self.accepted[row] = not node.refusal
        for phase, mask in self.serves.items():
            mask[row] = node.serves(phase)
        p, d = self.prefill, self.decode
        nu = model.uncached_per_iteration
        p.c0_share[row], p.c0_each[row] = (0.0, model.c0) if nu is None else (model.c0 / nu, 0.0)
        p.c0_whole[row], p.per_nu[row] = (0.0, 0.0) if nu is None else (model.c0, 1.0 / nu)
        p.c1[row], p.c2[row], p.c3[row], p.c4[row] = model.c1, model.c2, model.c3, model.c4
        p.c5[row], p.u0[row] = model.c5, model.u0
        self.knees = bool(p.c5.any())
        if node.telemetry is not None:
            pool = node.telemetry.kv.l2
            p.total[row], p.used[row], p.referenced[row] = pool.total, pool.used, pool.referenced
            p.free[row] = max(0, pool.total - pool.used)
        d.d0[row], d.d1[row], d.d2[row], d.d3[row] = model.d0, model.d1, model.d2, model.d3
        d.untouched[row] = model.fed_tokens * (math.log1p(-model.expert_share) if model.expert_share < 1 else -math.inf)
        d.per_token[row] = 1.0 / max(1.0, model.fed_tokens * SPECULATION)
        if node.hello is not None:
            held = node.hello.capacities
            d.capacity[row], d.limit[row] = held.l1_tokens or math.inf, held.running or math.inf

    def check(self) -> None:
        """Rows say what their nodes say."""
        assert list(self.names) == sorted(self._nodes)
        for name, row in self.index.items():
            node, model = self._nodes[name]
            assert self.heard[row] == node.heard, f"{name}: heard"
            assert self.accepted[row] == (not node.refusal), f"{name}: refusal"
            assert all(self.serves[phase][row] == node.serves(phase) for phase in self.serves), f"{name}: phase"
            assert self.prefill.c1[row] == model.c1, f"{name}: model"
