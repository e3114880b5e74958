"""What a harness's hook tells about branches: from its JSON to events. Pure.

Branch ids are those that the same program's HTTP requests carry: the session's, or `session/agent` for a sub-agent.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

SIGNS_OF_LIFE = frozenset({"UserPromptSubmit", "PreToolUse", "PostToolUse", "Notification", "Stop", "PreCompact"})


class Said(NamedTuple):
    """What to say of `branch`."""

    branch: str
    kind: str
    parent: str | None = None
    version: int | None = None
    event_id: str | None = None


def read(given: object) -> list[Said]:
    """The events of one hook call: Claude Code's words (`hook_event_name`), or an event as it stands (`type`).

    [] for what says nothing about branches; ValueError for what is neither.
    """
    if not isinstance(given, Mapping):
        raise ValueError(f"the input is no JSON object but {type(given).__name__}")
    if isinstance(given.get("hook_event_name"), str):
        return _claude_code(given["hook_event_name"], given)
    if isinstance(given.get("type"), str) and isinstance(given.get("branch"), str):
        version = given.get("version")
        number = version if isinstance(version, int) and not isinstance(version, bool) else None
        event_id = _text(given, "event_id") or _text(given, "id")
        return [Said(given["branch"], given["type"], _text(given, "parent"), number, event_id)]
    raise ValueError("the input has neither `hook_event_name` nor `type` and `branch`")


def _claude_code(event: str, given: Mapping[str, Any]) -> list[Said]:
    session, agent = _text(given, "session_id"), _text(given, "agent_id")
    if session is None:
        raise ValueError(f"{event} without a session_id")
    branch = session if agent is None else f"{session}/{agent}"
    match event:
        case "SessionStart":
            return [_started(session, given)]
        case "SubagentStart" if agent is not None:
            return [Said(branch, "subagent", session)]
        case "SubagentStop" if agent is not None and given.get("agent_type"):
            # a compaction stops an agent without a type that was never started
            return [Said(branch, "end")]
        case "SessionEnd":
            return [Said(session, "end")]
    return [Said(branch, "keepalive")] if event in SIGNS_OF_LIFE else []


def _started(session: str, given: Mapping[str, Any]) -> Said:
    parent = _text(given, "parent_session_id") or _text(given, "forked_from")
    if given.get("source") == "compact":
        return Said(session, "compact")
    if given.get("source") == "fork" and parent is not None and parent != session:
        return Said(session, "fork", parent)
    return Said(session, "open")


def _text(given: Mapping[str, Any], key: str) -> str | None:
    value = given.get(key)
    return value if isinstance(value, str) and value else None
