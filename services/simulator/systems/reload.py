"""Ours with predictive reload: a prefix goes to the device shortly before its branch is likely to come back.

When that is comes from the directory's learned waits (docs/decisions/0006), where it will be needed from the router's
placement of the context as it is now. One upload a wait; a branch that does not come leaves a cached copy behind.
"""

import heapq
from array import array
from collections.abc import Sequence

import msgspec

from schemas.directory import MatchReply
from schemas.phase import Phase
from services.router.core.placement import Prompt
from services.simulator.call import Call
from services.simulator.system import Action, Preload
from services.simulator.systems.own import Own, OwnSettings


class Reload(Own):
    """`planner` False: on a fixed split."""

    def __init__(self, *, planner: bool = True) -> None:
        super().__init__(OwnSettings(planner=planner), id="ours-reload" if planner else "static-own-reload")
        self._contexts: dict[str, array[int]] = {}
        self._ahead: dict[str, str] = {}
        self._due: list[tuple[float, str]] = []

    def arrived(self, call: Call, now: float) -> Sequence[Action]:
        self._contexts.pop(call.branch, None)
        return super().arrived(call, now)

    def ended(self, call: Call, now: float) -> Sequence[Action]:
        context = call.keys + call.output_keys
        actions = super().ended(call, now)
        if not call.last:
            self._contexts[call.branch] = context
            heapq.heappush(self._due, (self._due_at(call.branch, now), call.branch))
        return actions

    def _match(self, call: Call, now: float) -> MatchReply:
        """The router is told how much of what was brought ahead still lies on its node's device."""
        match, node = super()._match(call, now), self._ahead.pop(call.branch, None)
        nodes = [
            msgspec.structs.replace(held, l1_blocks=self.cluster.nodes[node].cached_blocks(call)[0])
            if held.node == node
            else held
            for held in match.nodes
        ]
        return msgspec.structs.replace(match, nodes=nodes)

    def next_wake(self, now: float) -> float | None:
        return min(self._tick_at, self._due[0][0]) if self._due else self._tick_at

    def wake(self, now: float) -> Sequence[Action]:
        actions = list(super().wake(now)) if now >= self._tick_at else []
        while self._due and self._due[0][0] <= now:
            _, branch = heapq.heappop(self._due)
            if branch not in self._contexts:
                continue
            due = self._due_at(branch, now)
            if due > now:  # what kind of wait it is has changed
                heapq.heappush(self._due, (due, branch))
            else:
                context = self._contexts.pop(branch)
                node = self._ahead[branch] = self._node(context, now)
                actions.append(Preload(branch, context, node))
        return actions

    def _due_at(self, branch: str, now: float) -> float:
        """When the upload for an absent branch is to begin."""
        tokens = len(self._contexts[branch]) * self.cluster.block_tokens
        return self.directory.likely_back_at(branch, now) - self.cluster.hardware.restore_s(tokens)

    def _node(self, context: "array[int]", now: float) -> str:
        """Where a request that goes on from this context would be placed now."""
        block_tokens = self.cluster.block_tokens
        prompt = Prompt(len(context) * block_tokens + 1, block_tokens, self.directory.placement(context))
        return self._placer.predict(prompt, self._placer.serving(Phase.PREFILL, (), now), now).best(self._turn).node
