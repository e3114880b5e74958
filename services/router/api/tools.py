"""Tools as every dialect comes to: functions in OpenAI's form, and how calls of them are to be told apart."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from services.router.api.errors import ApiError
from services.router.core.failure import invalid

MAX_TOOLS, MAX_NAME_CHARACTERS = 1024, 128

Function = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Tools:
    """What the model may call. `one_call`: at most one call an answer.

    `kinds`: by name, what a dialect must know to say a call of it in its own way.
    """

    functions: tuple[Function, ...] = ()
    one_call: bool = False
    kinds: Mapping[str, Any] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.functions)


def function_of(name: object, description: object, parameters: object, where: str) -> Function:
    """One function in OpenAI's form; 400 names what is wrong with it."""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARACTERS:
        raise ApiError(invalid(f"{where}.name must have 1 to {MAX_NAME_CHARACTERS} characters", f"{where}.name"))
    function: Function = {"name": name}
    if description is not None:
        if not isinstance(description, str):
            raise ApiError(invalid(f"{where}.description must be a string", f"{where}.description"))
        function["description"] = description
    if parameters is not None and not isinstance(parameters, dict):
        raise ApiError(invalid(f"{where}.parameters must be an object", f"{where}.parameters"))
    function["parameters"] = parameters if parameters else {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def checked(functions: list[Function], field_name: str = "tools") -> tuple[Function, ...]:
    """The functions of a request: not too many, no name twice."""
    if len(functions) > MAX_TOOLS:
        raise ApiError(invalid(f"{field_name} has {len(functions)} entries, the limit is {MAX_TOOLS}", field_name))
    names = [function["function"]["name"] for function in functions]
    twice = next((name for index, name in enumerate(names) if name in names[:index]), None)
    if twice is not None:
        raise ApiError(invalid(f"{field_name} has two functions named {twice!r}", field_name))
    return tuple(functions)


def entries(value: object, field_name: str = "tools") -> list[dict[str, Any]]:
    """The objects of a tools list; 400 otherwise."""
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise ApiError(invalid(f"{field_name} must be a list of objects", field_name))
    return value


def refuse_forced(choice: object) -> None:
    """400 for a choice that would force a call: that takes a grammar, and engines without a tokenizer have none."""
    shown = json.dumps(choice)[:60]
    text = f"tool_choice {shown} is not supported here, auto and none are: the engines cannot force a call"
    raise ApiError(invalid(text, "tool_choice", "unsupported_parameter"))


def chat_tools(raw: Mapping[str, Any]) -> Tools:
    """`tools`, `tool_choice` and `parallel_tool_calls` of the chat dialect."""
    functions: list[Function] = []
    for index, entry in enumerate(entries(raw.get("tools"))):
        where = f"tools[{index}]"
        function = entry.get("function")
        if entry.get("type", "function") != "function" or not isinstance(function, dict):
            kind = str(entry.get("type"))[:40]
            text = f"{where}.type {kind!r} is not supported here, a function is"
            raise ApiError(invalid(text, where, "unsupported_parameter"))
        described = (function.get("name"), function.get("description"), function.get("parameters"))
        functions.append(function_of(*described, f"{where}.function"))
    return chosen(checked(functions), raw.get("tool_choice"), one_call=raw.get("parallel_tool_calls") is False)


def chosen(
    functions: tuple[Function, ...], choice: object, *, one_call: bool, kinds: Mapping[str, Any] | None = None
) -> Tools:
    """The tools that count under a `tool_choice` of OpenAI's."""
    if choice not in (None, "auto", "none"):
        refuse_forced(choice)
    if choice == "none" or not functions:
        return Tools()
    return Tools(functions, one_call, kinds or {})


def arguments_of(value: object) -> Any:
    """Arguments as a template takes them: an object where the text is one, else the text."""
    if not isinstance(value, str):
        return value if value is not None else {}
    try:
        found = json.loads(value) if value else {}
    except (ValueError, RecursionError):
        return value
    return found if isinstance(found, dict) else value
