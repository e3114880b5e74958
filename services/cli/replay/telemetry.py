"""What the cluster says about the requests of a replay: queueing, restored tokens, predictions, switches."""

from collections.abc import Sequence

import msgspec

from schemas.codec import RejectedMessage
from schemas.phase import DECISION, PHASE_STATE, SwitchState
from schemas.subjects import Subjects
from schemas.telemetry import REQUEST_TELEMETRY, RequestTelemetry
from services.bus import Delivery, NatsBus
from services.cli.replay.records import RequestRecord
from services.cli.replay.report import SwitchSeen


class ClusterWatch:
    """Listens beside a replay; `rejected` counts messages that could not be read."""

    def __init__(self, bus: NatsBus, partition: str, clock_offset_s: float) -> None:
        """`clock_offset_s`: Unix time at the start of the replay."""
        self._bus, self._subjects, self._offset_s = bus, Subjects(partition), clock_offset_s
        self._requests: dict[str, RequestTelemetry] = {}
        self._switches: dict[str, SwitchSeen] = {}
        self.split = ""
        self.rejected = 0

    async def start(self) -> None:
        await self._bus.subscribe(self._subjects.telemetry_request(Subjects.ANY), self._on_request)
        await self._bus.subscribe(self._subjects.planner_decision(), self._on_decision)
        await self._bus.subscribe(self._subjects.phase_state(Subjects.ANY), self._on_state)

    def join(self, records: Sequence[RequestRecord]) -> None:
        """Add to each record what the cluster said about its request."""
        for record in records:
            seen = self._requests.get(record.request)
            if seen is None:
                continue
            record.restored_tokens = seen.restored_tokens
            record.ttft_predicted_s = seen.ttft_predicted_s
            if seen.t_prefill_start is not None and seen.t_placed is not None:
                record.queue_s = max(0.0, seen.t_prefill_start - seen.t_placed)

    def switches(self) -> list[SwitchSeen]:
        """Changes of the split since the start, in order."""
        return list(self._switches.values())

    async def _on_request(self, delivery: Delivery) -> None:
        try:
            seen = REQUEST_TELEMETRY.decode(delivery.data)
        except RejectedMessage:
            self.rejected += 1
            return
        known = self._requests.get(seen.request)
        if known is None or known.t_prefill_start is None:
            self._requests[seen.request] = seen

    async def _on_decision(self, delivery: Delivery) -> None:
        try:
            decision = DECISION.decode(delivery.data)
        except RejectedMessage:
            self.rejected += 1
            return
        self.split = decision.split_new or decision.split_now
        if decision.applied and decision.split_new is not None:
            known = self._switches.get(decision.id) or SwitchSeen(decision.t - self._offset_s, decision.id, "", None, 0)
            self._switches[decision.id] = msgspec.structs.replace(known, split=decision.split_new)

    async def _on_state(self, delivery: Delivery) -> None:
        """A switch takes as long as its slowest node; the node's answer may come before the decision."""
        try:
            state = PHASE_STATE.decode(delivery.data)
        except RejectedMessage:
            self.rejected += 1
            return
        if state.state is not SwitchState.SWITCHED or not state.decision_id:
            return
        known = self._switches.get(state.decision_id) or SwitchSeen(
            state.t - self._offset_s, state.decision_id, "", None, 0
        )
        took_s = max(known.took_s or 0.0, state.took_s or 0.0)
        self._switches[state.decision_id] = msgspec.structs.replace(
            known, took_s=took_s, moved=known.moved + state.moved
        )
