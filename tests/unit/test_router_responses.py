"""The Responses dialect: items as a template takes them, and answers item by item."""

import json
from typing import Any

import pytest

from services.router.api.errors import ApiError
from services.router.api.images import Images
from services.router.api.responses_request import ResponsesRequest, conversation, refuse_unsupported, tools_of
from services.router.api.responses_response import ResponseShape
from services.router.api.shape import Ending, Head
from services.router.core.effects import Outcome
from services.router.core.failure import unavailable
from services.router.text.pieces import CallBegun, CallPart, Gathered, Piece, Text, Thought
from tests.router_records import record

CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}


def test_items_become_the_turns_of_a_conversation() -> None:
    items: list[dict[str, Any]] = [
        {"role": "developer", "content": "rules"},
        {"role": "user", "content": [{"type": "input_text", "text": "go"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "sure"}]},
        CALL,
        {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "***"},
        {"type": "function_call_output", "call_id": "c1", "output": "18"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "done"}]},
    ]
    found = conversation(ResponsesRequest(input=items, instructions="be kind"), Images())
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}},
        {"id": "c2", "type": "function", "function": {"name": "patch", "arguments": {"input": "***"}}},
    ]
    assert found == [
        {"role": "system", "content": "be kind"},
        {"role": "system", "content": "rules"},
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "sure", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "18"},
        {"role": "tool", "tool_call_id": "c2", "content": "done"},
    ]


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}, "input[0].content[0]"),
        ({"type": "item_reference", "id": "x"}, "input[0]"),
        ({"role": "wizard", "content": "x"}, "input[0].role"),
        ({"type": "function_call", "name": 5}, "input[0]"),
    ],
)
def test_what_cannot_be_said_is_named(item: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        conversation(ResponsesRequest(input=[item]), Images())
    assert refused.value.failure.param == param


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("previous_response_id", "resp_1"),
        ("background", True),
        ("text", {"format": {"type": "json_schema", "schema": {}}}),
        ("top_logprobs", 3),
    ],
)
def test_what_needs_a_store_or_a_grammar_is_refused(field: str, value: object) -> None:
    with pytest.raises(ApiError, match=field):
        refuse_unsupported({field: value})
    refuse_unsupported({"text": {"verbosity": "low", "format": {"type": "text"}}, "store": True})


PIECES: list[Piece] = [
    Thought("hm"),
    Text("Let"),
    Text(" me"),
    CallBegun(0, "f"),
    CallPart(0, '{"a"'),
    CallPart(0, ":1}"),
]


def events(data: bytes) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in data.decode().splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines]


def test_a_stream_builds_the_response_that_it_ends_with() -> None:
    shape = ResponseShape(Head("resp_1", 0, "m"), {}, {"tools": []})
    data = shape.opening(None) + shape.delta(PIECES[:2], None) + shape.delta(PIECES[2:], None)
    found = events(data + shape.closing(Ending(record(prompt=50, cached=16), "tool_calls")))
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert [event["type"].removeprefix("response.") for event in found] == [
        "created", "in_progress",
        "output_item.added", "reasoning_text.delta", "reasoning_text.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    done = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    response = found[-1]["response"]
    assert response["output"] == done
    assert response["usage"]["input_tokens_details"] == {"cached_tokens": 16}
    assert done[2]["arguments"] == '{"a":1}'
    whole = ResponseShape(Head("resp_1", 0, "m"), {}, {}).whole(
        Gathered.of(PIECES), Ending(record(outcome=Outcome.LENGTH), "length"), None
    )
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call"]
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


def test_calls_of_namespaces_and_custom_tools_are_told_in_their_own_way() -> None:
    member = {"type": "function", "name": "spawn", "parameters": {}}
    spaces = [{"type": "namespace", "name": name, "tools": [member]} for name in ("agents", "others")]
    tools = tools_of({"tools": [*spaces, {"type": "custom", "name": "patch"}, {"type": "web_search"}]})
    assert [function["function"]["name"] for function in tools.functions] == ["spawn", "others__spawn", "patch"]
    shape = ResponseShape(Head("resp_1", 0, "m"), tools.kinds, {})
    pieces = [CallBegun(0, "spawn"), CallPart(0, "{}"), CallBegun(1, "patch"), CallPart(1, '{"input": "a\\nb"}')]
    pieces += [CallBegun(2, "others__spawn"), CallPart(2, "{}")]
    spawn, patch, other = shape.whole(Gathered.of(pieces), Ending(record(), "tool_calls"), None)["output"]
    assert (spawn["type"], spawn["namespace"]) == ("function_call", "agents")
    assert (other["name"], other["namespace"]) == ("spawn", "others")
    assert (patch["type"], patch["input"]) == ("custom_tool_call", "a\nb")


def test_a_failure_in_the_middle_is_a_failed_response() -> None:
    shape = ResponseShape(Head("resp_1", 0, "m"), {}, {})
    (failed,) = events(shape.broken(unavailable("no node", "no_node")))
    assert failed["type"] == "response.failed"
    assert failed["response"]["error"] == {"code": "no_node", "message": "no node"}


def test_a_member_of_a_namespace_keeps_its_own_name_apart_from_other_tools_and_in_the_history() -> None:
    function = {"type": "function", "name": "search", "parameters": {}}
    spaces = [{"type": "namespace", "name": name, "tools": [function]} for name in ("web", "code")]
    tools = tools_of({"tools": [*spaces, function]})
    assert [tool["function"]["name"] for tool in tools.functions] == ["web__search", "code__search", "search"]
    call = {"type": "function_call", "call_id": "c", "name": "search", "arguments": "{}"}
    items: list[dict[str, Any]] = [call | {"namespace": "code"}, call]
    (said,) = conversation(ResponsesRequest(input=items), Images(), tools.kinds)
    assert [each["function"]["name"] for each in said["tool_calls"]] == ["code__search", "search"]
