"""The messages of OpenAI's chat dialect, checked and as a chat template takes them."""

from typing import Any

from services.router.api.errors import ApiError
from services.router.api.tools import arguments_of
from services.router.core.failure import invalid

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
_TEXT = frozenset({"text", "input_text", "output_text", "refusal"})
_IMAGES = frozenset({"image_url", "input_image", "image"})
Message = dict[str, Any]


def chat_messages(messages: list[dict[str, Any]]) -> list[Message]:
    """Content as one string, `developer` said as `system`, arguments of calls as objects."""
    if not messages:
        raise ApiError(invalid("messages has 0 entries, at least 1 is needed", "messages"))
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: dict[str, Any], where: str) -> Message:
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise ApiError(invalid(f"{where}.role must be one of {', '.join(sorted(_ROLES))}", f"{where}.role"))
    role = {"developer": "system", "function": "tool"}.get(role, role)
    found = {**message, "role": role, "content": content_text(message.get("content"), f"{where}.content")}
    if message.get("tool_calls"):
        found["tool_calls"] = _calls(message["tool_calls"], f"{where}.tool_calls")
    return found


def _calls(calls: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise ApiError(invalid(f"{where} must be a list", where))
    found = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ApiError(invalid(f"{where}[{index}].function.name must be a string", f"{where}[{index}]"))
        found.append(call_of(call.get("id"), function["name"], function.get("arguments")))
    return found


def call_of(identity: object, name: str, arguments: object) -> dict[str, Any]:
    """One call of an earlier answer, as templates take it."""
    return {
        "id": identity if isinstance(identity, str) else "",
        "type": "function",
        "function": {"name": name, "arguments": arguments_of(arguments)},
    }


def content_text(content: object, where: str) -> str:
    """A message's content as one string; 400 names a part that is no text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(invalid(f"{where} must be a string or a list of parts", where))
    return "\n".join(_part(part, f"{where}[{index}]") for index, part in enumerate(content))


def _part(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise ApiError(invalid(f"{where} must be an object", where))
    kind = part.get("type")
    text = part.get("refusal" if kind == "refusal" else "text")
    if kind in _IMAGES:
        refuse_media(where, str(kind))
    if kind not in _TEXT or not isinstance(text, str):
        shown = str(kind)[:40]
        raise ApiError(invalid(f"{where}.type {shown!r} is not supported here, text is", where, "unsupported_part"))
    return text


def refuse_media(where: str, kind: str) -> None:
    """400: the model served here takes text only."""
    text = f"{where} is of type {kind!r}: this model takes text only"
    raise ApiError(invalid(text, where, "unsupported_part"))
