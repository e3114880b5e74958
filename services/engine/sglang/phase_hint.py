"""What a request carries through SGLang for our scheduler: its phase, as an action in its KV-hint envelope, and the
shortest answer it allows, which SGLang's front end refuses without a tokenizer."""

from typing import Any

from schemas.phase import Phase

PHASE_HINT = "ei.phase"
_SHORTEST = "ei_min_new_tokens"


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


class StopTokens:
    """In the place of the tokenizer that SGLang's minimum-length rule asks for stop tokens: it knows no others."""

    eos_token_id = None
    additional_stop_token_ids = None


def shortest_answer(tokens: int) -> dict[str, Any]:
    """The `custom_params` of a request whose answer must have so many tokens at least."""
    return {_SHORTEST: tokens}


def apply_shortest_answer(sampling_params: Any, phase: Phase) -> None:
    """Give SGLang's sampling parameters their minimum back. A decode leg counts the tokens after the first."""
    asked = (sampling_params.custom_params or {}).get(_SHORTEST, 0)
    if asked:
        sampling_params.custom_params = None
        sampling_params.min_new_tokens = asked - (phase is Phase.DECODE)
