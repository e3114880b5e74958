"""Anthropic's dialect: messages as a template takes them, and answers block by block."""

import json
from typing import Any

import pytest

from services.router.api.anthropic_request import (
    MessagesRequest,
    conversation,
    refuse_structured,
    template_arguments,
    tools_of,
)
from services.router.api.anthropic_response import MessageShape
from services.router.api.errors import ApiError
from services.router.api.images import Images
from services.router.api.shape import Ending, Head
from services.router.text.pieces import CallBegun, CallPart, Gathered, Piece, Text, Thought
from tests.router_records import record


def asked(*messages: dict[str, Any], **more: Any) -> MessagesRequest:
    return MessagesRequest(messages=list(messages), **more)


def said(role: str, *blocks: Any) -> dict[str, Any]:
    return {"role": role, "content": list(blocks)}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def test_system_blocks_come_first_and_late_system_messages_stay() -> None:
    found, begun = conversation(
        asked(said("user", text("hi")), {"role": "system", "content": "late"}, system=[text("a"), text("b")]),
        Images(),
    )
    assert found == [
        {"role": "system", "content": "a\nb"},
        {"role": "user", "content": "hi"},
        {"role": "system", "content": "late"},
    ]
    assert begun == ""


def test_results_of_tools_come_before_what_is_said_with_them() -> None:
    use = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": 1}}
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    failed = {"type": "tool_result", "tool_use_id": "toolu_1", "is_error": True, "content": [text("no"), text("way")]}
    found, _ = conversation(
        asked(said("user", text("go")), said("assistant", thought, text("sure"), use), said("user", text("?"), failed)),
        Images(),
    )
    call = {"id": "toolu_1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    assert found[1] == {"role": "assistant", "content": "sure", "reasoning_content": "hm", "tool_calls": [call]}
    assert found[2:] == [
        {"role": "tool", "tool_call_id": "toolu_1", "content": "Error: no\nway"},
        {"role": "user", "content": "?"},
    ]


def test_a_result_alone_is_no_empty_word_of_the_user() -> None:
    result = {"type": "tool_result", "tool_use_id": "t", "content": "18"}
    found, _ = conversation(asked(said("user", text("go")), said("user", result)), Images())
    assert found[1:] == [{"role": "tool", "tool_call_id": "t", "content": "18"}]


def test_words_the_client_begins_the_answer_with_are_its_beginning() -> None:
    found, begun = conversation(asked(said("user", text("go")), said("assistant", text("The answer is "))), Images())
    assert ([message["role"] for message in found], begun) == (["user"], "The answer is")


@pytest.mark.parametrize(
    ("message", "where"),
    [
        (said("user", {"type": "image", "source": {}}), "messages.0.content.0"),
        (said("user", {"type": "document"}), "messages.0.content.0"),
        (said("user", {"type": "tool_result", "content": [{"type": "image"}]}), "messages.0.content.0.content.0"),
        (said("user", {"type": "sculpture"}), "messages.0.content.0"),
        (said("user", 5), "messages.0.content.0"),
        ({"role": "user", "content": 5}, "messages.0.content"),
        ({"role": "wizard", "content": "x"}, "messages.0.role"),
        (said("assistant", {"type": "tool_use", "name": 5}), "messages.0.content.0"),
    ],
)
def test_what_cannot_be_said_is_named(message: dict[str, Any], where: str) -> None:
    with pytest.raises(ApiError) as refused:
        conversation(asked(message), Images())
    assert refused.value.failure.status == 400
    assert refused.value.failure.param == where


def test_tools_that_only_anthropic_could_run_are_left_out() -> None:
    own = {"name": "f", "description": "d", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}
    tools = tools_of({"tools": [own, {"type": "web_search_20250305", "name": "web_search"}]})
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    assert tools.functions == ({"type": "function", "function": function},)
    assert not tools_of({"tools": [own], "tool_choice": {"type": "none"}})
    with pytest.raises(ApiError, match="tool_choice"):
        tools_of({"tools": [own], "tool_choice": {"type": "tool", "name": "f"}})


def test_an_effort_is_taken_and_a_form_is_not() -> None:
    refuse_structured({"output_config": {"effort": "high"}})
    with pytest.raises(ApiError, match="structured output"):
        refuse_structured({"output_config": {"format": {"type": "json_schema"}}})
    assert template_arguments(asked(said("user"), thinking={"type": "disabled"})) == {"enable_thinking": False}
    assert template_arguments(asked(said("user"), thinking={"type": "adaptive"})) == {}


def events(data: bytes) -> list[dict[str, Any]]:
    found = []
    for part in data.decode().split("\n\n"):
        if part:
            name, _, content = part.partition("\n")
            found.append(json.loads(content.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
    return found


PIECES: list[Piece] = [
    Thought("hm"), Thought("!"), Text("Let"), Text(" me"), CallBegun(0, "f"), CallPart(0, '{"a"'), CallPart(0, ":1}"),
    CallBegun(1, "g"), CallPart(1, "{}"),
]  # fmt: skip


def test_a_stream_opens_and_closes_one_block_after_the_other() -> None:
    shape = MessageShape(Head("msg_1", 0, "m"), 50)
    data = shape.opening(None) + shape.delta(PIECES[:3], None) + shape.delta(PIECES[3:], None)
    data += shape.closing(Ending(record(prompt=50, cached=16, output=9), "tool_calls"))
    found = events(data)
    assert [event["type"] for event in found if event["type"] != "content_block_delta"] == [
        "message_start", "ping", *["content_block_start", "content_block_stop"] * 4, "message_delta", "message_stop",
    ]  # fmt: skip
    starts = [event for event in found if event["type"] == "content_block_start"]
    assert [(start["index"], start["content_block"]["type"]) for start in starts] == [
        (0, "thinking"), (1, "text"), (2, "tool_use"), (3, "tool_use"),
    ]  # fmt: skip
    parts = [event["delta"].get("partial_json") for event in found if event.get("index") == 2 and "delta" in event]
    assert json.loads("".join(parts)) == {"a": 1}
    assert found[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert found[-2]["usage"]["input_tokens"] == 34
    assert found[-2]["usage"]["cache_read_input_tokens"] == 16


def test_a_whole_message_says_the_same() -> None:
    shape = MessageShape(Head("msg_1", 0, "m"), 50)
    whole = shape.whole(Gathered.of(PIECES), Ending(record(prompt=50, cached=16, output=9), "tool_calls"), None)
    assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert [block["input"] for block in whole["content"][2:]] == [{"a": 1}, {}]
    stopped = shape.whole(Gathered.of([]), Ending(record(), "stop", "END"), None)
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "END")
    assert stopped["content"] == [{"type": "text", "text": ""}]
