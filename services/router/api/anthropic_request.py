"""Anthropic requests as they come: typed fields, and their messages as a chat template takes them."""

from typing import Any

from services.router.api.conversation import Content, Message, call_of, images_after_results, joined
from services.router.api.errors import ApiError, shown
from services.router.api.images import Images, refuse
from services.router.api.sampling import SamplingFields
from services.router.api.tools import Function, Tools, checked, entries, function_of, refuse_forced
from services.router.core.failure import invalid

_ROLES = ("user", "assistant", "system")
_FILES = frozenset({"document", "container_upload"})
_UNSAID = frozenset({"redacted_thinking"})


class MessagesRequest(SamplingFields, kw_only=True):
    """`POST /v1/messages`. Unknown fields are accepted and ignored."""

    messages: list[dict[str, Any]]
    model: str | None = None
    max_tokens: int | None = None
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    system: str | list[dict[str, Any]] | None = None
    thinking: dict[str, Any] | None = None


def refuse_structured(raw: dict[str, Any]) -> None:
    """400 for an answer of a given form; other output settings are taken."""
    output = raw.get("output_config")
    wanted = raw.get("output_format") or (output.get("format") if isinstance(output, dict) else None)
    if wanted is not None:
        text = f"output format {shown(wanted, 60)} is not supported here: structured output is not built yet"
        raise ApiError(invalid(text, "output_config.format", "unsupported_parameter"))


def template_arguments(asked: MessagesRequest) -> dict[str, Any]:
    """Thinking that is switched off is said to the template; otherwise the model does as it is used to."""
    kind = (asked.thinking or {}).get("type")
    return {"enable_thinking": False} if kind == "disabled" else {}


def conversation(asked: MessagesRequest, images: Images) -> tuple[list[Message], str]:
    """The messages, system first, and the words the client has begun the answer with."""
    if not asked.messages:
        raise ApiError(invalid("messages: at least 1 message is needed, got 0", "messages"))
    found: list[Message] = []
    if system := _text(asked.system, "system"):
        found.append({"role": "system", "content": system})
    for index, message in enumerate(asked.messages):
        found += _messages(message, f"messages.{index}", images)
    found = images_after_results(found)
    last = found[-1]
    if last["role"] == "assistant" and not last.get("tool_calls"):
        return found[:-1], str(last["content"]).rstrip()
    return found, ""


def tools_of(raw: dict[str, Any]) -> Tools:
    """Tools with a schema of their own. Those that Anthropic's servers run are left out: nobody could run them."""
    functions: list[Function] = []
    for index, entry in enumerate(entries(raw.get("tools"))):
        where = f"tools.{index}"
        if entry.get("type", "custom") != "custom" and "input_schema" not in entry:
            continue
        functions.append(function_of(entry.get("name"), entry.get("description"), entry.get("input_schema"), where))
    choice = raw.get("tool_choice")
    if choice is not None and not isinstance(choice, dict):
        raise ApiError(invalid(f"tool_choice must be an object, got {shown(choice)}", "tool_choice"))
    kind = (choice or {}).get("type", "auto")
    if kind not in ("auto", "none"):
        refuse_forced(choice)
    if kind == "none" or not functions:
        return Tools()
    return Tools(checked(functions), one_call=bool((choice or {}).get("disable_parallel_tool_use")))


def _messages(message: dict[str, Any], where: str, images: Images) -> list[Message]:
    """One message; results of tools come before what else a user says with them."""
    role, content = message.get("role"), message.get("content")
    if role not in _ROLES:
        raise ApiError(invalid(f"{where}.role must be user, assistant or system, got {shown(role)}", f"{where}.role"))
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise ApiError(invalid(f"{where}.content must be a string or a list of blocks", f"{where}.content"))
    results: list[Message] = []
    parts: list[str | None] = []
    said: Message = {"role": role, "content": ""}
    for index, block in enumerate(content):
        place = f"{where}.content.{index}"
        if not isinstance(block, dict):
            raise ApiError(invalid(f"{place} must be an object", place))
        kind = block.get("type")
        if kind == "tool_result":
            results.append(_result(block, place, images))
        elif kind == "tool_use":
            said.setdefault("tool_calls", []).append(_call(block, place))
        elif kind == "thinking":
            said["reasoning_content"] = said.get("reasoning_content", "") + str(block.get("thinking") or "")
        elif kind not in _UNSAID:
            parts.append(_block(block, place, images, role == "user"))
    said["content"] = joined(parts)
    silent = not (parts or said.get("tool_calls"))
    return results if results and silent else [*results, said]


def _call(block: dict[str, Any], where: str) -> dict[str, Any]:
    name = block.get("name")
    if not isinstance(name, str):
        raise ApiError(invalid(f"{where}.name must be a string", where))
    return call_of(block.get("id"), name, block.get("input"))


def _result(block: dict[str, Any], where: str, images: Images) -> Message:
    content = _content(block.get("content"), f"{where}.content", images)
    if block.get("is_error"):
        failed = [{"type": "text", "text": "Error:"}]
        content = f"Error: {content}" if isinstance(content, str) else [*failed, *content]
    identity = block.get("tool_use_id")
    return {"role": "tool", "tool_call_id": identity if isinstance(identity, str) else "", "content": content}


def _text(content: object, where: str) -> str:
    """A string, or the texts of blocks."""
    found = _content(content, where, None)
    assert isinstance(found, str)
    return found


def _content(content: object, where: str, images: Images | None) -> Content:
    """A string, or blocks; `images` None: only texts may stand here."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise ApiError(invalid(f"{where} must be a string or a list of blocks", where))
    parts: list[str | None] = []
    for index, block in enumerate(content):
        if not isinstance(block, dict):
            raise ApiError(invalid(f"{where}.{index} must be an object", where))
        parts.append(_block(block, f"{where}.{index}", images or Images(), images is not None))
    return joined(parts)


def _block(block: dict[str, Any], where: str, images: Images, seen: bool) -> str | None:
    """The words of a block, None for an image; `seen`: images may stand here."""
    kind, text = block.get("type"), block.get("text")
    if kind == "image" and not seen:
        refuse(where, kind, images.why_not_here)
    if kind == "image":
        images.add_source(block.get("source"), kind, where)
        return None
    if kind in _FILES:
        refuse(where, kind, "files are not read here")
    if kind == "text" and not isinstance(text, str):
        raise ApiError(invalid(f"{where}.text must be a string, got {shown(text)}", f"{where}.text"))
    if not isinstance(text, str):
        raise ApiError(invalid(f"{where}.type {shown(kind)} is not supported here, text is", where, "unsupported_part"))
    return text
