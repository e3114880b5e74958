"""The messages of OpenAI's chat dialect, checked and as a chat template takes them."""

from typing import Any

from services.router.api.errors import ApiError, shown
from services.router.api.images import Images, refuse
from services.router.api.tools import arguments_of
from services.router.core.failure import invalid

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
_TEXT = frozenset({"text", "input_text", "output_text", "refusal"})
_IMAGES = frozenset({"image_url", "input_image", "image"})
Message = dict[str, Any]
Content = str | list[dict[str, Any]]
"""What a message says: words, or parts where images are among them."""
_SEEN = frozenset({"user", "tool"})


def chat_messages(messages: list[dict[str, Any]], images: Images) -> list[Message]:
    """Content as one string or parts, `developer` said as `system`, arguments of calls as objects.

    A field that is null is not there: templates ask whether there are calls, not whether there is a list of them.
    """
    if not messages:
        raise ApiError(invalid("messages has 0 entries, at least 1 is needed", "messages"))
    found = [_message(message, f"messages[{index}]", images) for index, message in enumerate(messages)]
    return images_after_results(found)


def _message(message: dict[str, Any], where: str, images: Images) -> Message:
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise ApiError(invalid(f"{where}.role must be one of {', '.join(sorted(_ROLES))}", f"{where}.role"))
    role = {"developer": "system", "function": "tool"}.get(role, role)
    read = content_of if role in _SEEN else content_text
    found = {key: value for key, value in message.items() if value is not None and key != "tool_calls"}
    found |= {"role": role, "content": read(message.get("content"), f"{where}.content", images)}
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


def content_text(content: object, where: str, images: Images) -> str:
    """A message's content as one string; 400 names a part that is no text."""
    found = content_of(content, where, images, images.why_not_here)
    assert isinstance(found, str)
    return found


def content_of(content: object, where: str, images: Images, refused: str = "") -> Content:
    """A message's content, its images added to `images`; 400 names a part that is neither text nor image.

    `refused`: why no image may stand here.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(invalid(f"{where} must be a string or a list of parts", where))
    return joined([_part(part, f"{where}[{index}]", images, refused) for index, part in enumerate(content)])


def joined(parts: list[str | None]) -> Content:
    """Texts as one, line by line; where there are images (None) among them, parts."""
    if None not in parts:
        return "\n".join(part for part in parts if part is not None)
    found: list[dict[str, Any]] = []
    for part in parts:
        if part is None:
            found.append({"type": "image"})
        elif found and found[-1]["type"] == "text":
            found[-1] = {"type": "text", "text": f"{found[-1]['text']}\n{part}"}
        else:
            found.append({"type": "text", "text": part})
    return found


def images_after_results(messages: list[Message]) -> list[Message]:
    """Images of tools' results are shown by the user after them: templates take words for results."""
    found: list[Message] = []
    waiting: list[dict[str, Any]] = []
    for message in messages:
        content = message.get("content")
        if message["role"] != "tool" and waiting:
            if message["role"] == "user":
                said = content if isinstance(content, list) else [{"type": "text", "text": content}] if content else []
                message = message | {"content": [*waiting, *said]}
            else:
                found.append({"role": "user", "content": waiting})
            waiting = []
        elif message["role"] == "tool" and isinstance(content, list):
            waiting = [*waiting, *(part for part in content if part["type"] == "image")]
            text = "\n".join(part["text"] for part in content if part["type"] == "text")
            message = message | {"content": text}
        found.append(message)
    return [*found, {"role": "user", "content": waiting}] if waiting else found


def _part(part: object, where: str, images: Images, refused: str) -> str | None:
    """The words of a part, None for an image."""
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise ApiError(invalid(f"{where} must be an object", where))
    kind = part.get("type")
    if kind in _IMAGES:
        if refused:
            refuse(where, kind, refused)
        images.add_url(part.get("image_url"), kind, where)
        return None
    text = part.get("refusal" if kind == "refusal" else "text")
    if kind in _TEXT and not isinstance(text, str):
        raise ApiError(invalid(f"{where}.text must be a string, got {shown(text)}", f"{where}.text"))
    if not isinstance(text, str) or kind not in _TEXT:
        raise ApiError(invalid(f"{where}.type {shown(kind)} is not supported here, text is", where, "unsupported_part"))
    return text
