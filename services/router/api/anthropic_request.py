"""Anthropic requests as they come: typed fields, and their messages as a chat template takes them."""

from typing import Any

from services.router.api.conversation import Message, call_of, refuse_media
from services.router.api.errors import ApiError, shown
from services.router.api.sampling import SamplingFields
from services.router.api.tools import Function, Tools, checked, entries, function_of, refuse_forced
from services.router.core.failure import invalid

_ROLES = ("user", "assistant", "system")
_MEDIA = frozenset({"image", "document", "container_upload"})
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


def conversation(asked: MessagesRequest) -> tuple[list[Message], str]:
    """The messages, system first, and the words the client has begun the answer with."""
    if not asked.messages:
        raise ApiError(invalid("messages: at least 1 message is needed, got 0", "messages"))
    found: list[Message] = []
    if system := _text(asked.system, "system"):
        found.append({"role": "system", "content": system})
    for index, message in enumerate(asked.messages):
        found += _messages(message, f"messages.{index}")
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
    if kind == "none" or not functions:
        return Tools()
    if kind != "auto":
        refuse_forced(choice)
    return Tools(checked(functions), one_call=bool((choice or {}).get("disable_parallel_tool_use")))


def _messages(message: dict[str, Any], where: str) -> list[Message]:
    """One message; results of tools come before what else a user says with them."""
    role, content = message.get("role"), message.get("content")
    if role not in _ROLES:
        raise ApiError(invalid(f"{where}.role must be user, assistant or system, got {shown(role)}", f"{where}.role"))
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise ApiError(invalid(f"{where}.content must be a string or a list of blocks", f"{where}.content"))
    results: list[Message] = []
    texts: list[str] = []
    said: Message = {"role": role, "content": ""}
    for index, block in enumerate(content):
        place = f"{where}.content.{index}"
        if not isinstance(block, dict):
            raise ApiError(invalid(f"{place} must be an object", place))
        kind = block.get("type")
        if kind == "tool_result":
            results.append(_result(block, place))
        elif kind == "tool_use":
            said.setdefault("tool_calls", []).append(_call(block, place))
        elif kind == "thinking":
            said["reasoning_content"] = said.get("reasoning_content", "") + str(block.get("thinking") or "")
        elif kind not in _UNSAID:
            texts.append(_block_text(block, place))
    said["content"] = "\n".join(texts)
    silent = not (texts or said.get("tool_calls"))
    return results if results and silent else [*results, said]


def _call(block: dict[str, Any], where: str) -> dict[str, Any]:
    name = block.get("name")
    if not isinstance(name, str):
        raise ApiError(invalid(f"{where}.name must be a string", where))
    return call_of(block.get("id"), name, block.get("input"))


def _result(block: dict[str, Any], where: str) -> Message:
    text = _text(block.get("content"), f"{where}.content")
    if block.get("is_error"):
        text = f"Error: {text}"
    identity = block.get("tool_use_id")
    return {"role": "tool", "tool_call_id": identity if isinstance(identity, str) else "", "content": text}


def _text(content: object, where: str) -> str:
    """A string, or the texts of blocks."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise ApiError(invalid(f"{where} must be a string or a list of blocks", where))
    texts = []
    for index, block in enumerate(content):
        if not isinstance(block, dict):
            raise ApiError(invalid(f"{where}.{index} must be an object", where))
        texts.append(_block_text(block, f"{where}.{index}"))
    return "\n".join(texts)


def _block_text(block: dict[str, Any], where: str) -> str:
    kind, text = block.get("type"), block.get("text")
    if kind in _MEDIA:
        refuse_media(where, str(kind))
    if not isinstance(text, str):
        raise ApiError(invalid(f"{where}.type {shown(kind)} is not supported here, text is", where, "unsupported_part"))
    return text
