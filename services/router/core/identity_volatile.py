"""Text that changes from request to request at the head of a prompt, so that nothing after it could be reused.

Claude Code's first system block names the client's build and a checksum that differs between a session's main agent,
its sub-agents and its compacted context. We are the last to read it, so it is dropped before the prompt is made.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

ATTRIBUTION: Final = "x-anthropic-billing-header:"


def without_volatile(body: dict[str, Any], prefixes: Sequence[str]) -> dict[str, Any]:
    """`body` without its first system text if that begins with one of `prefixes`; the same object if it does not.

    A system prompt in blocks loses the whole block, one that is a string its first line. `body` itself is not changed.
    """
    if not prefixes:
        return body
    system = body.get("system")
    if system is not None:
        kept = _kept(system, prefixes)
        return body if kept is system else {**body, "system": kept}
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        return body
    first = messages[0]
    if not isinstance(first, Mapping) or first.get("role") not in ("system", "developer"):
        return body
    content = first.get("content")
    kept = _kept(content, prefixes)
    return body if kept is content else {**body, "messages": [{**first, "content": kept}, *messages[1:]]}


def _kept(system: Any, prefixes: Sequence[str]) -> Any:
    if isinstance(system, str):
        return system.partition("\n")[2].lstrip("\n") if _volatile(system, prefixes) else system
    first = system[0] if isinstance(system, list) and system else None
    text = first.get("text") if isinstance(first, Mapping) else None
    return system[1:] if isinstance(system, list) and _volatile(text, prefixes) else system


def _volatile(text: object, prefixes: Sequence[str]) -> bool:
    return isinstance(text, str) and text.lstrip().startswith(tuple(prefixes))
