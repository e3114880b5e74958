"""Odd but legal requests: what clients send that nobody had in mind, and answers that are cut."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.router_stage import Stage, in_memory, stage

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "get_weather", "parameters": PARAMETERS}
SCRIPT = """
[[reply]]
pattern = "two"
calls = [
  { name = "get_weather", arguments = { city = "Paris" } },
  { name = "get_weather", arguments = { city = "Rome" } },
]
"""


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


async def test_events_of_a_response_are_numbered_in_the_order_in_which_they_come() -> None:
    async with stage(in_memory(), "n") as s:
        reply = await s.post(RESPONSES, {"input": "hi", "max_output_tokens": 3, "stream": True})
        assert [event["sequence_number"] for event in reply.events] == list(range(len(reply.events)))
        assert reply.events[0]["type"] == "response.created"
        await s.settled()


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.toml"
    path.write_text(SCRIPT)
    return str(path)


async def calls(s: Stage, **fields: Any) -> tuple[list[tuple[str, str]], str, str]:
    """Calls (name and arguments), text and reason of a chat, streamed if that is asked."""
    body = {"messages": user("two"), "tools": [{"type": "function", "function": FUNCTION}], **fields}
    reply = await s.post(CHAT, body)
    assert reply.status == 200, reply.body
    if not reply.events:
        message = reply.body["choices"][0]["message"]
        found = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]
        return found, message["content"] or "", reply.finish
    names: dict[int, list[str]] = {}
    text = ""
    for choice in (event["choices"][0] for event in reply.events):
        text += choice["delta"].get("content") or ""
        for call in choice["delta"].get("tool_calls", []):
            said = names.setdefault(call["index"], [call["function"].get("name", ""), ""])
            said[1] += call["function"]["arguments"]
    return [(name, arguments) for name, arguments in names.values()], text, reply.finish


async def test_a_call_that_was_cut_is_never_told_as_a_complete_one(script: str) -> None:
    paris, rome = ('{"city": "Paris"}', '{"city": "Rome"}')
    async with stage(in_memory()) as s:
        await s.engine("n", script=script)
        complete = [("get_weather", paris), ("get_weather", rome)]
        for streamed in (False, True):
            assert await calls(s, stream=streamed) == (complete, "", "tool_calls")
            for cut, reason in (({"stop": ["ome"]}, "stop"), ({"max_tokens": 143}, "length")):
                found, text, finish = await calls(s, stream=streamed, **cut)
                assert (found[0], finish, text) == (("get_weather", paris), reason, ""), (streamed, cut)
                assert found[1][0] == "get_weather"
                assert rome.startswith(found[1][1]), "only what the model wrote"
                assert len(found[1][1]) < len(rome)
        body = {"input": "two", "max_output_tokens": 143, "tools": [{"type": "function", **FUNCTION}]}
        whole = (await s.post(RESPONSES, body)).body
        assert [item["status"] for item in whole["output"]] == ["completed", "incomplete"]
        await s.settled()


async def test_a_choice_that_forces_a_call_is_refused_even_if_no_tool_is_left() -> None:
    search = {"type": "web_search_20250305", "name": "web_search"}
    asked: list[tuple[str, dict[str, Any]]] = [
        (CHAT, {"messages": user("x"), "tool_choice": "required"}),
        (CHAT, {"messages": user("x"), "tools": [], "tool_choice": {"type": "function", "function": {"name": "f"}}}),
        (RESPONSES, {"input": "x", "tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}),
        (
            MESSAGES,
            {
                "messages": user("x"),
                "max_tokens": 3,
                "tools": [search],
                "tool_choice": {"type": "tool", "name": "web_search"},
            },
        ),
    ]
    async with stage(in_memory(), "n") as s:
        for path, body in asked:
            reply = await s.post(path, body)
            assert reply.status == 400, (path, reply.body)
            assert "tool_choice" in reply.error["message"]


async def test_what_a_template_cannot_take_is_refused_and_what_is_null_is_not_there() -> None:
    async with stage(in_memory(), "n") as s:
        reply = await s.post(CHAT, {"messages": user("x"), "chat_template_kwargs": {"self": 1}})
        assert (reply.status, reply.error["param"]) == (400, "chat_template_kwargs")
        text = await s.post(CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]})
        assert "messages[0].content[0].text must be a string" in text.error["message"]
        block = [{"role": "user", "content": [{"type": "text", "text": 5}]}]
        text = await s.post(MESSAGES, {"messages": block, "max_tokens": 3})
        assert "messages.0.content.0.text must be a string" in text.error["message"]
        logprobs = await s.post(RESPONSES, {"input": "x", "include": ["message.output_text.logprobs"]})
        assert (logprobs.status, logprobs.error["param"]) == (400, "include")
        untyped = await s.post(RESPONSES, {"input": [{"type": None, "role": "user", "content": "x"}]})
        assert untyped.status == 200


async def test_a_compressed_body_is_refused_by_name() -> None:
    async with stage(in_memory(), "n") as s:
        reply = await s.post(CHAT, b"\x1f\x8b\x08", content_encoding="gzip")
        assert (reply.status, reply.error["param"]) == (415, "content-encoding")
        assert (await s.post(CHAT, {"messages": user("x")}, content_encoding="identity")).status == 200


@pytest.mark.parametrize("pieces", [1, 3, 200])
async def test_a_client_that_offers_http_2_is_answered_over_http_1(pieces: int) -> None:
    """Java's own HTTP client offers the change with every request, and goes on in HTTP/1.1 where it is not taken."""
    body = json.dumps({"messages": user("hi"), "max_tokens": 3}).encode()
    offer = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n"
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n" % len(body)
    chunked = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n"
    sent = head + offer + b"\r\n" + body + chunked + offer + b"\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    sent += b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    async with stage(in_memory(), "n") as s:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(s.url.rpartition(":")[2]))
        size = -(-len(sent) // pieces)
        for at in range(0, len(sent), size):
            writer.write(sent[at : at + size])
            await writer.drain()
            await asyncio.sleep(0)
        answer = await asyncio.wait_for(reader.read(), 10)
        writer.close()
        assert answer.count(b"HTTP/1.1 200") == 3, answer
        assert answer.count(b'"prompt_tokens":21') == 2
        await s.settled()


async def test_a_branch_named_in_utf_8_is_the_same_in_a_header_and_in_a_body() -> None:
    async with stage(in_memory(), "n") as s:
        name = "Köln-日本"
        sent = s.http.post(
            s.url + CHAT,
            json={"messages": user("x"), "max_tokens": 2},
            headers={"x-ei-branch-id": name},
        )
        async with sent as response:
            assert response.status == 200
        assert s.router.core.memory.knows("", name)


async def test_a_connection_outlives_the_pause_of_a_tool() -> None:
    """Clients keep connections for 5 s and longer; a server that hangs up first loses what they send just then."""
    async with stage(in_memory(), "n") as s:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(s.url.rpartition(":")[2]))
        for pause_s in (0.0, 5.5):
            await asyncio.sleep(pause_s)
            writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            answer = await asyncio.wait_for(reader.readuntil(b"ok\n"), 5)
            assert answer.startswith(b"HTTP/1.1 200")
        writer.close()
