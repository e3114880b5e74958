"""Dialects of harnesses, each as its program sends it unmodified; what cannot be used counts as not said.

A session id that siblings share is a family, not a branch: its branches are told apart by their contexts.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

from schemas.branch import BranchKind, Compaction
from services.router.core.identity_claims import MAX_BRANCH_CHARACTERS, Claims, usable

Headers = Mapping[str, str]
Body = Mapping[str, Any]
_JSON_CHARACTERS: Final = 16_384
_WINDOW_DIGITS: Final = 9
CLAUDE_SIDE: Final = frozenset({"auxiliary", "side_reply"})
CODEX_SIDE_KINDS: Final = frozenset({"prewarm", "memory"})
CODEX_SIDE_AGENTS: Final = frozenset({"compact", "memory_consolidation"})
FAMILY_HEADERS: Final = ("x-session-id", "x-session-affinity", "session_id", "session-id")


def dynamo(headers: Headers, body: Body) -> Claims | None:
    """`x-dynamo-session-id`, its parent and final flag; fork or sub-agent is told by the context."""
    branch = usable(headers.get("x-dynamo-session-id"))
    if branch is None:
        return None
    parent = usable(headers.get("x-dynamo-parent-session-id"))
    final = headers.get("x-dynamo-session-final", "").lower() in ("true", "1")
    return Claims(branch, branch, parent if parent != branch else None, end=final)


def claude_code(headers: Headers, body: Body) -> Claims | None:
    """Session, agent and parent agent of Claude Code; compaction and request class where it sends gateway hints."""
    session = usable(headers.get("x-claude-code-session-id"))
    if session is None:
        return None
    asked = headers.get("x-claude-code-request-class", "")
    compaction = None
    if asked == "compaction" or headers.get("x-claude-code-compaction"):
        compaction = Compaction.SUMMARY
    elif headers.get("x-claude-code-context-compacted"):
        compaction = Compaction.DONE
    agent = usable(headers.get("x-claude-code-agent-id"))
    branch = _joined(session, agent)
    if compaction is Compaction.SUMMARY or asked in CLAUDE_SIDE or not body.get("tools"):
        return Claims(session, branch, _claude_parent(session, agent, headers), None, BranchKind.TRANSIENT, compaction)
    kind = None
    if agent is not None:
        kind = BranchKind.FORK if headers.get("x-claude-code-agent-type") == "fork" else BranchKind.SUBAGENT
    return Claims(session, branch, _claude_parent(session, agent, headers), None, kind, compaction)


def codex(headers: Headers, body: Body) -> Claims | None:
    """Thread, parent thread and window of Codex: the window's number is the version. Proxies may have dropped the
    headers; the same words stand in `client_metadata`."""
    said = body.get("client_metadata")
    metadata = said if isinstance(said, Mapping) else {}
    window = usable(headers.get("x-codex-window-id") or metadata.get("x-codex-window-id"))
    turn = _object(headers.get("x-codex-turn-metadata") or metadata.get("x-codex-turn-metadata"))
    if window is None and not turn:
        return None
    named, _, number = (window or "").rpartition(":")
    thread = usable(headers.get("thread-id") or metadata.get("thread_id") or turn.get("thread_id") or named)
    if thread is None:
        return None
    family = usable(headers.get("session-id") or metadata.get("session_id") or turn.get("session_id"))
    agent = headers.get("x-openai-subagent", "")
    parent, kind = usable(headers.get("x-codex-parent-thread-id") or turn.get("parent_thread_id")), None
    forked = usable(turn.get("forked_from_thread_id"))
    if parent is not None:
        kind = BranchKind.SUBAGENT
    elif forked is not None:
        parent, kind = forked, BranchKind.FORK
    if parent == thread:
        parent, kind = None, None
    asked = turn.get("request_kind")
    summary = asked == "compaction"
    if summary or asked in CODEX_SIDE_KINDS or agent in CODEX_SIDE_AGENTS:
        kind = BranchKind.TRANSIENT
    version = int(number) if number.isascii() and number.isdigit() and len(number) <= _WINDOW_DIGITS else None
    return Claims(family, thread, parent, version, kind, Compaction.SUMMARY if summary else None)


def opencode(headers: Headers, body: Body) -> Claims | None:
    """Session and parent session of OpenCode. Its title request shares the session's id and has no tools."""
    agent = headers.get("user-agent", "")
    if not agent.startswith("opencode/") and "x-parent-session-id" not in headers:
        return None
    branch = usable(headers.get("x-session-id") or headers.get("x-session-affinity"))
    if branch is None:
        return None
    parent = usable(headers.get("x-parent-session-id"))
    kind = None if body.get("tools") else BranchKind.TRANSIENT
    return Claims(parent or branch, branch, parent if parent != branch else None, None, kind)


def litellm(headers: Headers, body: Body) -> Claims | None:
    """`x-litellm-session-id`, as OpenHands and LiteLLM send it: condenser and sub-agents may share it."""
    return _family(headers.get("x-litellm-session-id"))


def session_header(headers: Headers, body: Body) -> Claims | None:
    """A session header of a program that is not known otherwise."""
    return _family(next((headers[name] for name in FAMILY_HEADERS if headers.get(name)), None))


def session_field(headers: Headers, body: Body) -> Claims | None:
    """The body field `session_id`."""
    return _family(body.get("session_id"))


def user_id(headers: Headers, body: Body) -> Claims | None:
    """The session in Anthropic's `metadata.user_id`: a JSON object, or the older `..._session_<id>`."""
    metadata = body.get("metadata")
    text = metadata.get("user_id") if isinstance(metadata, Mapping) else None
    if not isinstance(text, str):
        return None
    _, found, session = text.rpartition("_session_")
    return _family(session if found else _object(text).get("session_id"))


def prompt_cache_key(headers: Headers, body: Body) -> Claims | None:
    """OpenAI's `prompt_cache_key`: the OpenAI Agents SDK makes one a run."""
    return _family(body.get("prompt_cache_key"))


def _family(value: object) -> Claims | None:
    family = usable(value)
    return None if family is None else Claims(family)


def _joined(session: str, agent: str | None) -> str:
    """An agent's branch: ids of agents are unique within their session only."""
    return session if agent is None else f"{session}/{agent}"[:MAX_BRANCH_CHARACTERS]


def _claude_parent(session: str, agent: str | None, headers: Headers) -> str | None:
    if agent is None:
        return None
    above = usable(headers.get("x-claude-code-parent-agent-id"))
    return _joined(session, above if above != agent else None)


def _object(text: object) -> Mapping[str, Any]:
    """A JSON object in a string; empty when there is none."""
    if not isinstance(text, str) or not text.startswith("{") or len(text) > _JSON_CHARACTERS:
        return {}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
