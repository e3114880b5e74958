"""The official `openai` package against `ei up`: chat, completions and responses, streamed or not, with tools."""

import json
from collections.abc import AsyncIterator
from importlib.util import find_spec
from typing import Any

import openai
import pytest
import pytest_asyncio

from tests.cluster import Cluster

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": SCHEMA}}
]
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
WEATHER: list[Any] = [{"role": "user", "content": "the weather in Paris and Rome?"}]
PARIS, ROME = {"city": "Paris", "days": 2}, {"city": "Rome"}


needs_parsers = pytest.mark.skipif(find_spec("sglang") is None, reason="tools need SGLang's parsers: extra `engine`")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def client(scripted: Cluster) -> AsyncIterator[openai.AsyncOpenAI]:
    key = "dummy-not-a-key"
    async with openai.AsyncOpenAI(base_url=scripted.url + "/v1", api_key=key, max_retries=0) as made:
        yield made


async def test_chat_whole_and_streamed(client: openai.AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(model="timed", messages=HELLO, seed=3)
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == ("Good day, Zoë.", "stop")
    assert whole.usage is not None
    assert whole.usage.prompt_tokens_details is not None
    stream = await client.chat.completions.create(
        model="timed", messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == "Good day, Zoë."
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


async def test_a_stop_string_ends_the_text_before_it(client: openai.AsyncOpenAI) -> None:
    asked: list[Any] = [{"role": "user", "content": "count to five"}]
    answer = await client.chat.completions.create(model="timed", messages=asked, stop=[" four"])
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("one two three", "stop")


@needs_parsers
async def test_tools_and_their_results(client: openai.AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(model="timed", messages=WEATHER, tools=TOOLS)
    choice = whole.choices[0]
    calls: list[Any] = choice.message.tool_calls or []
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me look."
    assert [call.function.name for call in calls] == ["get_weather"] * 2
    assert [json.loads(call.function.arguments) for call in calls] == [PARIS, ROME]
    history: list[Any] = [
        *WEATHER,
        choice.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": calls[0].id, "content": "18 degrees"},
        {"role": "tool", "tool_call_id": calls[1].id, "content": "20 degrees"},
    ]
    after = await client.chat.completions.create(model="timed", messages=history, tools=TOOLS)
    assert after.choices[0].message.content == "It is 18 degrees in Paris."


async def streamed(client: openai.AsyncOpenAI, **asked: Any) -> tuple[str, list[Any], str, set[str]]:
    """Text, arguments of the calls, why it ended, and the calls' ids, put together as clients do."""
    text, calls, reason, ids = "", dict[int, str](), "", set[str]()
    async for chunk in await client.chat.completions.create(model="timed", stream=True, **asked):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
            for call in choice.delta.tool_calls or []:
                assert call.function is not None
                calls[call.index] = calls.get(call.index, "") + (call.function.arguments or "")
                ids |= {call.id} if call.id else set()
    return text, [json.loads(arguments) for arguments in calls.values()], reason, ids


@needs_parsers
async def test_streamed_tools(client: openai.AsyncOpenAI) -> None:
    text, calls, reason, ids = await streamed(client, messages=WEATHER, tools=TOOLS)
    assert (text.strip(), calls, reason, len(ids)) == ("Let me look.", [PARIS, ROME], "tool_calls", 2)


@needs_parsers
async def test_one_call_at_most(client: openai.AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"messages": WEATHER, "tools": TOOLS, "parallel_tool_calls": False}
    whole = await client.chat.completions.create(model="timed", **asked)
    calls: list[Any] = whole.choices[0].message.tool_calls or []
    assert [json.loads(call.function.arguments) for call in calls] == [PARIS]
    _, found, reason, _ = await streamed(client, **asked)
    assert (found, reason) == ([PARIS], "tool_calls")


async def test_without_a_choice_of_tools_the_text_is_text(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="timed", messages=WEATHER, tools=TOOLS, tool_choice="none")
    assert answer.choices[0].message.tool_calls is None
    assert "<tool_call>" in (answer.choices[0].message.content or "")


async def test_completions(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="timed", prompt="hello", max_tokens=8)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("Good day", "length")


async def test_models(client: openai.AsyncOpenAI) -> None:
    page = await client.models.list()
    assert [model.id for model in page.data] == ["timed"]
    told: Any = (await client.models.retrieve("timed")).model_extra
    assert told["tools"]["template"] == "default"


async def test_errors_are_the_sdks_own(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="not served here"):
        await client.chat.completions.create(model="other", messages=HELLO)
    with pytest.raises(openai.BadRequestError, match="n must be 1, got 2") as refused:
        await client.chat.completions.create(model="timed", messages=HELLO, n=2)
    assert refused.value.param == "n"
    image: Any = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(openai.BadRequestError, match=r"messages\[0\]\.content\[0\].*image_url.*text only"):
        await client.chat.completions.create(model="timed", messages=[{"role": "user", "content": [image]}])
    with pytest.raises(openai.BadRequestError, match="structured output"):
        await client.responses.create(model="timed", input="x", text={"format": {"type": "json_object"}})


async def test_responses_whole_and_streamed(client: openai.AsyncOpenAI) -> None:
    whole = await client.responses.create(model="timed", input="hello", instructions="Be kind.")
    assert (whole.output_text, whole.status) == ("Good day, Zoë.", "completed")
    assert whole.usage is not None
    kinds, text = [], ""
    async for event in await client.responses.create(model="timed", input="hello", stream=True):
        kinds.append(event.type)
        if event.type == "response.output_text.delta":
            text += event.delta
        if event.type == "response.completed":
            assert event.response.output_text == "Good day, Zoë."
    assert text == "Good day, Zoë."
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    cut = await client.responses.create(model="timed", input="hello", max_output_tokens=4)
    assert (cut.status, cut.output_text) == ("incomplete", "Good")


@needs_parsers
async def test_responses_with_tools(client: openai.AsyncOpenAI) -> None:
    tools: list[Any] = [{"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": False}]
    asked: list[Any] = [{"role": "user", "content": "the weather in Paris and Rome?"}]
    async with client.responses.stream(model="timed", input=asked, tools=tools) as stream:
        final: Any = await stream.get_final_response()
    calls = [item for item in final.output if item.type == "function_call"]
    assert [json.loads(call.arguments) for call in calls] == [PARIS, ROME]
    results = [{"type": "function_call_output", "call_id": calls[0].call_id, "output": "18 degrees"}]
    history = [*asked, *(item.to_dict() for item in final.output), *results]
    after = await client.responses.create(model="timed", input=history, tools=tools)
    assert after.output_text == "It is 18 degrees in Paris."


@needs_parsers
async def test_responses_with_namespaces_and_custom_tools(client: openai.AsyncOpenAI) -> None:
    spawn = {"type": "function", "name": "spawn_agent", "parameters": {"type": "object", "properties": {}}}
    tools: list[Any] = [
        {"type": "namespace", "name": "agents", "tools": [spawn]},
        {"type": "custom", "name": "apply_patch", "description": "Edit files"},
        {"type": "web_search"},
    ]
    spawned: Any = await client.responses.create(model="timed", input="spawn a helper", tools=tools)
    assert (spawned.output[0].name, spawned.output[0].namespace) == ("spawn_agent", "agents")
    patched: Any = await client.responses.create(model="timed", input="patch the file", tools=tools)
    assert (patched.output[0].type, patched.output[0].input) == ("custom_tool_call", "*** Begin")
