"""How a request carries its phase through SGLang: one action in its KV-hint envelope."""

from typing import Any

from schemas.phase import Phase

PHASE_HINT = "ei.phase"


def phase_hint(rid: str, phase: Phase) -> dict[str, Any]:
    """The `kv_hints` of a request."""
    action = {"action_id": "phase", "action_type": PHASE_HINT, "action_version": "1", "payload": {"phase": str(phase)}}
    return {"protocol_version": "1", "message_id": rid, "actions": [action]}


def hinted_phase(kv_hints: Any) -> Phase:
    """The phase in SGLang's decoded envelope; decode when it says nothing."""
    for action in kv_hints.actions if kv_hints else ():
        if action.action_type == PHASE_HINT:
            return Phase(action.payload["phase"])
    return Phase.DECODE
