"""The project's default tool template, for models whose own chat template has none: tools said in plain messages.

Calls are written as `<tool_call>{"name", "arguments"}</tool_call>`, the format that SGLang's parser `hermes` reads.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

PARSER = "hermes"
_INTRODUCTION = """You may call functions to do your work. They are described here, one JSON object a line:
<tools>
{tools}
</tools>
To call one, write exactly this, with the function's name and its arguments as one JSON object:
<tool_call>
{{"name": "function name", "arguments": {{"argument": "value"}}}}
</tool_call>
Write several of these to call several. What they return stands between <tool_response> and </tool_response>."""

Message = Mapping[str, Any]


def in_plain_messages(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The conversation with tools, calls and results said in the contents of system, user and assistant messages."""
    plain = [_plain(message) for message in messages]
    if tools:
        plain = _introduced(plain, _INTRODUCTION.format(tools="\n".join(_line(tool) for tool in tools)))
    return _results_joined(plain)


def _introduced(messages: list[Message], text: str) -> list[Message]:
    if messages and messages[0]["role"] == "system":
        first = messages[0] | {"content": f"{messages[0]['content']}\n\n{text}".lstrip()}  # type: ignore[operator]  # a dict of str
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _line(tool: Mapping[str, Any]) -> str:
    return json.dumps(tool.get("function", tool), ensure_ascii=False)


def _plain(message: Message) -> Message:
    content = message.get("content") or ""
    if isinstance(content, list):
        return {"role": message["role"], "content": content}
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>", "result": True}
    calls = [_call(call["function"]) for call in message.get("tool_calls") or ()]
    return {"role": message["role"], "content": "\n".join([*([content] if content else []), *calls])}


def _call(function: Mapping[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


def _results_joined(messages: Sequence[Message]) -> list[Message]:
    """Results that follow one another, and what the user says after them, are one message: roles take turns."""
    joined: list[Message] = []
    for message in messages:
        last = joined[-1] if joined else None
        if last is not None and last.get("result") and message["role"] == "user":
            content = _after(last["content"], message["content"])
            joined[-1] = {"role": "user", "content": content, "result": message.get("result", False)}
        else:
            joined.append(message)
    return [{"role": message["role"], "content": message["content"]} for message in joined]


def _after(results: str, content: Any) -> Any:
    """Contents one after the other; one with images is a list of parts."""
    if isinstance(content, list):
        return [{"type": "text", "text": f"{results}\n"}, *content]
    return f"{results}\n{content}"
