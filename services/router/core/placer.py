"""Where requests go, over all nodes at once: who is there, what they have to do, and how fast they are."""

from collections.abc import Collection, Mapping

import numpy as np

from schemas.directory import MatchReply
from schemas.iteration_model import MEGA
from schemas.phase import Phase
from services.router.core.fetch_rates import FetchRates
from services.router.core.load import Ledger
from services.router.core.nodes import Nodes
from services.router.core.placement import TIE_S, FetchCost, Prompt
from services.router.core.roster import Floats, Holders, Mask, Roster
from services.router.core.sweep import Resumes, Sweep
from services.router.core.timing import Coefficients


class Placer:
    """Keeps a `Roster` in step with `nodes` (call `changed` whenever one did) and chooses by it.

    `handoff`: how fast KV goes from a prefill node to a decode node. What a decode node has on its device already does
    not travel again, so a branch's next answer is drawn to where the last one was.
    """

    def __init__(
        self,
        nodes: Nodes,
        ledger: Ledger,
        model: Coefficients,
        fetch: FetchCost,
        handoff: FetchCost,
        resume_tokens: int = 0,
    ) -> None:
        """`resume_tokens`: longest prefill that a decode node holding the rest may do; 0: none."""
        self._resume_tokens = resume_tokens
        self.nodes, self.ledger = nodes, ledger
        self.models: dict[str, Coefficients] = {}
        self.roster = Roster()
        self.fetches = FetchRates(fetch)
        self._model, self._handoff = model, handoff
        self._holders: tuple[MatchReply, Mapping[str, int], Holders] | None = None
        self._alive_at: tuple[tuple[float, float, bool], Mask] | None = None

    def changed(self, name: str) -> None:
        """Something about a node is new: what it is, its phase, its pool, or its model."""
        node = self.nodes.get(name)
        if node is not None:
            self.roster.put(node, self.model(name))
            self._alive_at = None

    def learned(self, models: dict[str, Coefficients]) -> None:
        """The planner's models; nodes it does not name keep the configured coefficients."""
        self.models = models
        for node in self.nodes:
            self.roster.put(node, self.model(node.name))

    def model(self, name: str) -> Coefficients:
        return self.models.get(name, self._model)

    def serving(self, phase: Phase, avoided: Collection[str], now: float) -> Mask:
        """Live nodes of the phase; those in `avoided` only if there is no other."""
        mask = self.roster.serves[phase] & self._alive(now)
        if not avoided:
            return mask
        rows = [row for row in map(self.roster.index.get, avoided) if row is not None]
        rest = mask.copy()
        rest[rows] = False
        return rest if np.count_nonzero(rest) else mask

    def predict(self, prompt: Prompt, prefill: Mask, now: float, decode: Mask | None = None) -> Sweep:
        """The time to first token on each node of `prefill`, and on those of `decode` that may resume the request."""
        roster, usable = self.roster, self.roster.accepted & self._alive(now)
        resumes = self._resumes(prompt, prefill, decode) if decode is not None and self._resume_tokens else None

        def waits(service_s: Floats) -> tuple[Floats, Floats]:
            remaining, queue = self.ledger.waits(roster.index, service_s, now)
            if resumes is not None:
                rows = roster.decode
                remaining = remaining + resumes.nodes * (rows.d0 + rows.d1 + rows.d2 * resumes.running)
            return remaining, queue

        rows = prefill if resumes is None else prefill | resumes.nodes
        held, index = self._held(prompt.match), roster.index
        return Sweep(prompt, held, roster, rows, usable, lambda source: self.fetches.row(source, index), waits, resumes)

    def _resumes(self, prompt: Prompt, prefill: Mask, decode: Mask) -> Resumes | None:
        """Decode nodes on whose device all but a few tokens of the prompt lie, and that have room for it twice: its two
        legs may not share their KV."""
        rows, index = self.roster.decode, self.roster.index
        held = [
            row
            for found in prompt.match.nodes
            if prompt.tokens - found.l1_blocks * prompt.block_size <= self._resume_tokens
            and (row := index.get(found.node)) is not None
            and decode[row]
            and not prefill[row]
        ]
        if not held:
            return None
        running, promised = self.ledger.decodes(index)
        here = np.zeros(len(index), bool)
        here[held] = True
        here &= (promised + 2 * prompt.tokens <= rows.capacity) & (running < rows.limit)
        return Resumes(here, running) if np.count_nonzero(here) else None

    def choose_decode(self, match: MatchReply, tokens: int, decode: Mask, prefill_node: str, turn: int) -> str:
        """The node of `decode` where the answer is done soonest, among those with room for its `tokens` of KV.

        Time of an answer: its iterations at the load it would find, and the KV that must travel there first. Where none
        has room: the one with the least promised, since the request waits for its turn there. Among equals the prefill
        node comes first, then nodes take turns.
        """
        rows, index = self.roster.decode, self.roster.index
        running, promised = self.ledger.decodes(index)
        context = promised + tokens
        roomy = decode & (context <= rows.capacity) & (running < rows.limit)
        if not np.count_nonzero(roomy):
            share = np.where(decode, promised / np.maximum(1.0, rows.capacity), np.inf)
            return self.roster.names[int(share.argmin())]
        count = running + 1.0
        phi = 1.0 - np.exp(rows.untouched * count)
        iteration_s = rows.d0 + rows.d1 * phi + rows.d2 * count + rows.d3 * (context / MEGA)
        answer_s = iteration_s * (rows.per_token * self.ledger.mean_output_tokens)
        seconds = np.where(roomy, answer_s + self._handoff_s(match, tokens, prefill_node), np.inf)
        best, row = float(seconds.min()) + TIE_S, index.get(prefill_node)
        if row is not None and seconds[row] <= best:
            return prefill_node
        equal = (seconds <= best).nonzero()[0]
        return self.roster.names[int(equal[turn % len(equal)])]

    def _handoff_s(self, match: MatchReply, tokens: int, prefill_node: str) -> Floats:
        """How long the KV that a node lacks travels; none does to the prefill node itself."""
        index, holders = self.roster.index, self._held(match)
        missing = np.full(len(index), float(tokens))
        missing[holders.rows] = np.maximum(0.0, tokens - holders.l1_blocks * self._block_size)
        own = index.get(prefill_node)
        if own is not None:
            missing[own] = 0.0
        return missing / self._handoff.tokens_per_s

    def _held(self, match: MatchReply) -> Holders:
        """Kept for the several questions of one placement."""
        index = self.roster.index
        if self._holders is None or self._holders[0] is not match or self._holders[1] is not index:
            self._holders = match, index, Holders(match, index)
        return self._holders[2]

    @property
    def _block_size(self) -> int:
        return self.nodes.reference.block_size if self.nodes.reference is not None else 1

    def _alive(self, now: float) -> Mask:
        """Kept for the several questions of one placement, all asked at the same `now`."""
        nodes = self.nodes
        asked = now, nodes.grace_from, nodes.suspended
        if self._alive_at is None or self._alive_at[0] != asked:
            alive = self.roster.alive(now, nodes.timeout_s, nodes.grace_from, suspended=nodes.suspended)
            self._alive_at = asked, alive
        return self._alive_at[1]

    def check(self) -> None:
        """The roster has every node as it is."""
        self.roster.check()
        self.fetches.check()
        assert set(self.roster.names) == {node.name for node in self.nodes}
