"""Anthropic's and the Responses API on the wire: errors in their shapes, signs of life, clients that go."""

import asyncio
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from schemas.phase import Phase
from services.router.api.formats import ModelFormats
from services.router.text.byte_tokenizer import byte_tokenizer
from services.router.text.chat_template import CHATML
from services.router.text.parsers import Formats, Parsers
from services.router.text.pieces import Gathered
from services.router.text.worker_process import WorkerFailed
from tests.engine_cluster import Gate, until
from tests.integration.test_router_failures import slowly
from tests.router_stage import Connect, Reply, in_memory, stage

HI = [{"role": "user", "content": "hi"}]
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
needs_parsers = pytest.mark.skipif(find_spec("sglang") is None, reason="needs SGLang's parsers: extra `engine`")


def asked(**more: Any) -> dict[str, Any]:
    return {"messages": HI, "max_tokens": 3, **more}


def refused(reply: Reply, status: int, kind: str, text: str) -> None:
    """An error in Anthropic's shape."""
    assert reply.status == status, reply.body
    assert set(reply.body) == {"type", "error"}
    assert reply.body["type"] == "error"
    assert reply.error["type"] == kind
    assert text in reply.error["message"]


@pytest.fixture
def memory() -> Connect:
    return in_memory()


async def test_errors_have_the_shape_of_the_api_that_was_asked(memory: Connect) -> None:
    async with stage(memory, "n0") as s:
        refused(await s.post(MESSAGES, b"{"), 400, "invalid_request_error", "not a JSON object")
        refused(await s.post(MESSAGES, {"messages": HI}), 400, "invalid_request_error", "max_tokens")
        refused(await s.post(MESSAGES, asked(messages=[])), 400, "invalid_request_error", "at least 1")
        refused(await s.post(MESSAGES, asked(temperature=3)), 400, "invalid_request_error", "temperature")
        refused(await s.post(MESSAGES, asked(stop_sequences=[""])), 400, "invalid_request_error", "stop string")
        refused(await s.post(MESSAGES, asked(model="x")), 404, "not_found_error", "'x' is not served")
        refused(await s.post(MESSAGES + "/count_tokens", {"messages": 5}), 400, "invalid_request_error", "messages")
        refused(
            await s.post(MESSAGES, asked(tools=[{"name": "f", "input_schema": {}}], tool_choice={"type": "any"})),
            400, "invalid_request_error", "tool_choice",
        )  # fmt: skip
        long = await s.post(MESSAGES, asked(messages=[{"role": "user", "content": "x" * 3000}]))
        refused(long, 400, "invalid_request_error", "prompt is too long: ")
        openai = await s.post(RESPONSES, {"input": HI, "previous_response_id": "r"})
        assert (openai.status, openai.error["param"]) == (400, "previous_response_id")
        await s.settled()


async def test_no_node_means_overloaded_and_later(memory: Connect) -> None:
    async with stage(memory) as s:
        await s.engine("p", phase=Phase.PREFILL)
        reply = await s.post(MESSAGES, asked())
        refused(reply, 503, "overloaded_error", "no live node serves decode")
        assert int(reply.headers["retry-after"]) > 0


async def test_unknown_fields_and_headers_are_taken(memory: Connect) -> None:
    more = {"context_management": {"edits": []}, "output_config": {"effort": "high"}, "thinking": {"type": "adaptive"}}
    async with stage(memory, "n0", model_aliases=["claude-*"]) as s:
        reply = await s.post(MESSAGES + "?beta=true", asked(model="claude-x", **more), anthropic_beta="new-2027")
        assert (reply.status, reply.body["stop_reason"]) == (200, "max_tokens")
        assert reply.headers["request-id"] == reply.headers["x-request-id"]
        counted = await s.post(MESSAGES + "/count_tokens", {"messages": HI})
        assert counted.body["input_tokens"] == reply.body["usage"]["input_tokens"]
        again = await s.post(RESPONSES, {"input": HI, "max_output_tokens": 3, "reasoning": {"effort": "low"}})
        assert (again.status, again.body["status"]) == (200, "incomplete")


async def test_a_long_prefill_is_kept_alive_in_the_apis_own_words(memory: Connect) -> None:
    async with stage(memory, keep_alive_s=0.05) as s:
        gate = Gate(1)
        await s.engine("n1", sleep=gate.sleep)
        async with s.http.post(s.url + MESSAGES, json=asked(stream=True)) as response:
            assert await response.content.readline() == b"event: message_start\n"
            told = [await response.content.readline() for _ in range(9)]
            assert told.count(b"event: ping\n") >= 2
            gate.open()
            rest = (await response.read()).decode()
        last = [line for line in rest.splitlines() if line.startswith("data: ")][-1]
        assert json.loads(last.removeprefix("data: ")) == {"type": "message_stop"}
        await s.settled()


@pytest.mark.parametrize(("path", "field"), [(MESSAGES, "messages"), (RESPONSES, "input")])
async def test_a_client_that_goes_cancels_its_request(memory: Connect, path: str, field: str) -> None:
    async with stage(memory) as s:
        await s.engine("n1", sleep=slowly(0.02))
        body = {field: HI, "max_tokens": 900, "max_output_tokens": 900, "stream": True}
        calling = asyncio.ensure_future(s.post(path, body))
        await until(lambda: any(len(request.answer) > 3 for request in s.router.core.requests.values()))
        calling.cancel()
        await asyncio.wait([calling])
        await s.settled()


async def test_without_the_parsers_tools_are_refused(memory: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.router.api.formats.installed", lambda: False)
    async with stage(memory, "n0") as s:
        reply = await s.post("/v1/chat/completions", asked(tools=TOOLS))
        assert (reply.status, reply.error["param"]) == (400, "tools")
        assert "extra `engine`" in reply.error["message"]
        assert (await s.get("/v1/models")).body["data"][0]["tools"] == {
            "supported": False, "template": "default", "parser": None,
        }  # fmt: skip
        assert ModelFormats(s.router.app.settings, s.router.parsers).known() == Formats()


@needs_parsers
@pytest.mark.timeout(300)
async def test_parsers_take_answers_apart_however_they_come() -> None:
    parsers = Parsers()
    call = '{"name": "f", "arguments": {"a": "b<", "n": [1, 2]}}'
    answer = f"Well <that.\n<tool_call>\n{call}\n</tool_call>\n<tool_call>\n{call}\n</tool_call>"
    try:
        for name in ("hermes", "qwen"):
            for step in (1, 7, 1000):
                parsing = await parsers.open("r", Formats(tool_parser=name), TOOLS)
                pieces = [p for at in range(0, len(answer), step) for p in await parsing.push(answer[at : at + step])]
                found = Gathered.of(pieces + await parsing.end(cut=False))
                assert found.text == "Well <that.", (name, step)
                assert [json.loads(c.arguments) for c in found.calls] == [{"a": "b<", "n": [1, 2]}] * 2, (name, step)
            whole = Gathered.of(await parsing.whole(answer, cut=False))
            assert (whole.text, len(whole.calls)) == ("Well <that.", 2)
        thinking = await parsers.open("t", Formats(reasoning_parser="qwen3"), [])
        parts = Gathered.of([*await thinking.push("<think>hm</think>Yes"), *await thinking.end(cut=False)])
        assert (parts.thought, parts.text) == ("hm", "Yes")
        with pytest.raises(WorkerFailed, match="nonsense"):
            await parsers.open("r", Formats(tool_parser="nonsense"), TOOLS)
        switch = "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
        formats = await parsers.detect("{% if tools %}<tool_call>{% endif %}<|im_start|>" + switch, [])
        assert (formats.tool_parser, formats.reasoning_parser) == ("qwen", "qwen3")
    finally:
        await parsers.stop()
    asking = asyncio.ensure_future(parsers.open("r", Formats(tool_parser="hermes"), TOOLS))
    await until(lambda: parsers.running)
    await parsers.stop()
    with pytest.raises(WorkerFailed, match="ended with code"):
        await asking


async def test_answers_that_come_back_otherwise_are_counted_by_cause(memory: Connect) -> None:
    async with stage(memory, "n0") as s:

        async def turn(*tail: dict[str, Any]) -> str:
            asked = {"messages": [*HI, *tail], "max_tokens": 9}
            reply = await s.post("/v1/chat/completions", asked, x_ei_branch_id="b")
            return str(reply.body["choices"][0]["message"]["content"])

        said = await turn()
        assistant = {"role": "assistant", "content": said}
        await turn(assistant, {"role": "user", "content": "on"})
        assert counted(await metrics(s), "text") == 0
        await turn()
        await turn({"role": "assistant", "content": said[:4] + "\x00"}, {"role": "user", "content": "on"})
        assert counted(await metrics(s), "text") == 4


def counted(text: str, cause: str) -> float:
    start = f'ei_router_answer_tokens_departed_total{{cause="{cause}"}} '
    return sum(float(line.removeprefix(start)) for line in text.splitlines() if line.startswith(start))


async def metrics(s: Any) -> str:
    async with s.http.get(s.url + "/metrics") as response:
        return str(await response.text())


@needs_parsers
@pytest.mark.timeout(300)
async def test_a_model_that_thinks_aloud_has_its_thoughts_told_apart(memory: Connect, tmp_path: Path) -> None:
    template = CHATML + "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(template)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    (tmp_path / "script.toml").write_text('[[reply]]\ntext = "<think>hm</think> Yes"\n')
    script = str(tmp_path / "script.toml")
    async with stage(memory, tokenizer=str(tmp_path), reasoning_parser="qwen3") as s:
        await s.engine("n0", script=script)
        await s.router.parsers.detect("", [])
        asked = {"messages": HI, "max_tokens": 50}
        chat = (await s.post("/v1/chat/completions", asked)).body["choices"][0]["message"]
        assert (chat["reasoning_content"], chat["content"].strip()) == ("hm", "Yes")
        streamed = await s.post(MESSAGES, asked | {"stream": True})
        kinds = [event["content_block"]["type"] for event in streamed.events if event["type"] == "content_block_start"]
        assert kinds == ["thinking", "text"]
        plain = await s.post("/v1/completions", {"prompt": "hi", "max_tokens": 50})
        assert plain.body["choices"][0]["text"].startswith("<think>")
