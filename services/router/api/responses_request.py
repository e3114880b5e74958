"""Responses requests as they come: typed fields, and their items as the messages a chat template takes."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from services.router.api.conversation import Message, call_of, content_of, content_text, images_after_results
from services.router.api.errors import ApiError, shown
from services.router.api.images import Images
from services.router.api.sampling import SamplingFields
from services.router.api.tools import Function, Tools, checked, chosen, entries, function_of
from services.router.core.failure import invalid

_ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant"}
_CALLS = {"function_call": "arguments", "custom_tool_call": "input"}
_RESULTS = frozenset({"function_call_output", "custom_tool_call_output"})
_STATE = ("previous_response_id", "conversation", "prompt")
CUSTOM = "custom"
LOGPROBS = "message.output_text.logprobs"


NO_KINDS: Final[Mapping[str, Any]] = MappingProxyType({})


class Member(NamedTuple):
    """A function of a namespace, as its harness knows it."""

    namespace: str
    name: str


class ResponsesRequest(SamplingFields, kw_only=True):
    """`POST /v1/responses`. Unknown fields are accepted and ignored; nothing is stored."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, Any] | None = None


def refuse_unsupported(raw: dict[str, Any]) -> None:
    """400 for what needs a store, a queue or a grammar."""
    for field in _STATE:
        if raw.get(field) is not None:
            text = f"{field} is not supported here: no response is stored, send the whole input"
            raise ApiError(invalid(text, field, "unsupported_parameter"))
    if raw.get("background") is True:
        raise ApiError(invalid("background true is not supported here", "background", "unsupported_parameter"))
    text_settings = raw.get("text")
    form = text_settings.get("format") if isinstance(text_settings, dict) else None
    if form is not None and (not isinstance(form, dict) or form.get("type") != "text"):
        text = f"text.format {shown(form, 60)} is not supported here: structured output is not built yet"
        raise ApiError(invalid(text, "text.format", "unsupported_parameter"))
    include = raw.get("include")
    if isinstance(include, list) and LOGPROBS in include:
        text = f"include {LOGPROBS!r} is not supported here: the engines give none"
        raise ApiError(invalid(text, "include", "unsupported_parameter"))
    if raw.get("top_logprobs"):
        text = f"top_logprobs {shown(raw['top_logprobs'])} is not supported here: the engines give none"
        raise ApiError(invalid(text, "top_logprobs", "unsupported_parameter"))


def tools_of(raw: dict[str, Any]) -> Tools:
    """Functions, those of namespaces, and custom tools as functions of one text. `kinds` says how a call is told.

    Tools that OpenAI's servers run are left out: nobody could run them.
    """
    functions: list[Function] = []
    kinds: dict[str, Any] = {}
    listed = entries(raw.get("tools"))
    taken = {str(entry.get("name")) for entry in listed if entry.get("type") in ("function", CUSTOM)}
    for index, entry in enumerate(listed):
        where = f"tools[{index}]"
        if entry.get("type") == "namespace":
            for inner, member in enumerate(entries(entry.get("tools"), f"{where}.tools")):
                function = _function(member, f"{where}.tools[{inner}]")
                if function is not None:
                    functions.append(_in_namespace(function, str(entry.get("name")), kinds, taken))
            continue
        function = _function(entry, where)
        if function is not None:
            functions.append(function)
            if entry.get("type") == CUSTOM:
                kinds[function["function"]["name"]] = CUSTOM
    one_call = raw.get("parallel_tool_calls") is False
    return chosen(checked(functions), raw.get("tool_choice"), one_call=one_call, kinds=kinds)


def _in_namespace(function: Function, namespace: str, kinds: dict[str, Any], taken: set[str]) -> Function:
    """The function under a name of its own: its own one, unless another tool has that too. `taken` grows."""
    name = function["function"]["name"]
    said = name if name not in taken else f"{namespace}__{name}"
    taken.add(said)
    kinds[said] = Member(namespace, name)
    return {**function, "function": {**function["function"], "name": said}}


def _function(entry: dict[str, Any], where: str) -> Function | None:
    kind, name, description = entry.get("type"), entry.get("name"), entry.get("description")
    if kind == "function":
        return function_of(name, description, entry.get("parameters"), where)
    if kind == CUSTOM:
        text = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
        return function_of(name, description, text, where)
    return None


def conversation(asked: ResponsesRequest, images: Images, kinds: Mapping[str, Any] = NO_KINDS) -> list[Message]:
    """The messages, instructions first. Calls join the assistant's message before them; those of a namespace are called
    what their function is called by `kinds`."""
    found: list[Message] = []
    said = {member: name for name, member in kinds.items() if isinstance(member, Member)}
    if asked.instructions:
        found.append({"role": "system", "content": asked.instructions})
    if isinstance(asked.input, str):
        return [*found, {"role": "user", "content": asked.input}]
    for index, item in enumerate(asked.input):
        _add(found, item, f"input[{index}]", images, said)
    if not found:
        raise ApiError(invalid("input has 0 items, at least 1 is needed", "input"))
    return images_after_results(found)


def _add(found: list[Message], item: dict[str, Any], where: str, images: Images, said: Mapping[Member, str]) -> None:
    kind = item.get("type") or "message"
    if kind == "message":
        role = item.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise ApiError(invalid(f"{where}.role must be one of {', '.join(_ROLES)}", f"{where}.role"))
        if role == "assistant":
            text = content_text(item.get("content"), f"{where}.content", images)
            message = _assistant(found)
            message["content"] = "\n".join(part for part in (message["content"], text) if part)
        else:
            read = content_of if role == "user" else content_text
            found.append({"role": _ROLES[role], "content": read(item.get("content"), f"{where}.content", images)})
    elif kind == "reasoning":
        text = _reasoning(item, where)
        if text:
            _assistant(found)["reasoning_content"] = text
    elif kind in _CALLS:
        _assistant(found).setdefault("tool_calls", []).append(_call(item, str(kind), where, said))
    elif kind in _RESULTS:
        content = content_of(item.get("output"), f"{where}.output", images)
        found.append({"role": "tool", "tool_call_id": str(item.get("call_id") or ""), "content": content})
    else:
        text = f"{where}.type {shown(kind)} is not supported here"
        raise ApiError(invalid(text, where, "unsupported_part"))


def _assistant(found: list[Message]) -> Message:
    """The assistant's message that is being put together: the last one, or a new one."""
    if not found or found[-1]["role"] != "assistant":
        found.append({"role": "assistant", "content": ""})
    return found[-1]


def _call(item: dict[str, Any], kind: str, where: str, said: Mapping[Member, str]) -> dict[str, Any]:
    name, given = item.get("name"), item.get(_CALLS[kind])
    if not isinstance(name, str):
        raise ApiError(invalid(f"{where}.name must be a string", where))
    name = said.get(Member(str(item.get("namespace")), name), name)
    return call_of(item.get("call_id"), name, {"input": given} if kind != "function_call" else given)


def _reasoning(item: dict[str, Any], where: str) -> str:
    """What was thought, where the item says it in the open."""
    content = item.get("content")
    if not isinstance(content, list):
        return ""
    texts = (part.get("text") for part in content if isinstance(part, dict))
    return "\n".join(text for text in texts if isinstance(text, str))
