"""The official `anthropic` package against `ei up`: messages whole and streamed, tools, counting, errors."""

from collections.abc import AsyncIterator
from importlib.util import find_spec
from typing import Any

import anthropic
import pytest
import pytest_asyncio

from tests.cluster import Cluster

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS: list[Any] = [{"name": "get_weather", "description": "Weather", "input_schema": SCHEMA}]
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
WEATHER: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "the weather in Paris and Rome?"}]}]
PARIS, ROME = {"city": "Paris", "days": 2}, {"city": "Rome"}


needs_parsers = pytest.mark.skipif(find_spec("sglang") is None, reason="tools need SGLang's parsers: extra `engine`")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def client(scripted: Cluster) -> AsyncIterator[anthropic.AsyncAnthropic]:
    key = "dummy-not-a-key"
    async with anthropic.AsyncAnthropic(base_url=scripted.url, api_key=key, max_retries=0) as made:
        yield made


async def test_messages_whole_and_streamed(client: anthropic.AsyncAnthropic) -> None:
    whole = await client.messages.create(model="timed", max_tokens=100, messages=HELLO, system="Be kind.")
    assert [block.to_dict() for block in whole.content] == [{"type": "text", "text": "Good day, Zoë."}]
    assert (whole.stop_reason, whole.role) == ("end_turn", "assistant")
    async with client.messages.stream(model="timed", max_tokens=100, messages=HELLO, system="Be kind.") as stream:
        text = "".join([part async for part in stream.text_stream])
        final = await stream.get_final_message()
    assert text == "Good day, Zoë."
    assert final.stop_reason == "end_turn"
    assert final.usage.output_tokens == whole.usage.output_tokens
    cached = final.usage.cache_read_input_tokens or 0
    assert cached > 0
    assert final.usage.input_tokens + cached == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)


async def test_length_and_stop_sequences(client: anthropic.AsyncAnthropic) -> None:
    cut = await client.messages.create(model="timed", max_tokens=4, messages=HELLO)
    assert cut.stop_reason == "max_tokens"
    asked: list[Any] = [{"role": "user", "content": "count to five"}]
    stopped = await client.messages.create(model="timed", max_tokens=100, messages=asked, stop_sequences=[" three"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " three")
    assert stopped.content[0].to_dict()["text"] == "one two"


async def test_a_bound_above_the_context_is_no_error(client: anthropic.AsyncAnthropic) -> None:
    answer = await client.messages.create(model="timed", max_tokens=500_000, messages=HELLO, timeout=30)
    assert answer.stop_reason == "end_turn"


@needs_parsers
async def test_tools_and_their_results(client: anthropic.AsyncAnthropic) -> None:
    whole = await client.messages.create(model="timed", max_tokens=500, messages=WEATHER, tools=TOOLS)
    uses: list[Any] = [block for block in whole.content if block.type == "tool_use"]
    assert whole.stop_reason == "tool_use"
    assert [(use.name, use.input) for use in uses] == [("get_weather", PARIS), ("get_weather", ROME)]
    results = [
        {"type": "tool_result", "tool_use_id": uses[0].id, "content": [{"type": "text", "text": "18 degrees"}]},
        {"type": "tool_result", "tool_use_id": uses[1].id, "content": "20 degrees"},
    ]
    history: list[Any] = [
        *WEATHER,
        {"role": "assistant", "content": whole.content},
        {"role": "user", "content": results},
    ]
    after = await client.messages.create(model="timed", max_tokens=100, messages=history, tools=TOOLS)
    assert after.content[0].to_dict()["text"] == "It is 18 degrees in Paris."


@needs_parsers
async def test_streamed_tools(client: anthropic.AsyncAnthropic) -> None:
    async with client.messages.stream(model="timed", max_tokens=500, messages=WEATHER, tools=TOOLS) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_message()
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3
    assert final.stop_reason == "tool_use"
    assert [block.type for block in final.content] == ["text", "tool_use", "tool_use"]
    assert [block.input for block in final.content if block.type == "tool_use"] == [PARIS, ROME]


@needs_parsers
async def test_one_call_at_most(client: anthropic.AsyncAnthropic) -> None:
    choice: Any = {"type": "auto", "disable_parallel_tool_use": True}
    asked: dict[str, Any] = {"max_tokens": 500, "messages": WEATHER, "tools": TOOLS, "tool_choice": choice}
    async with client.messages.stream(model="timed", **asked) as stream:
        final = await stream.get_final_message()
    assert [block.input for block in final.content if block.type == "tool_use"] == [PARIS]


@needs_parsers
async def test_tokens_are_counted_as_messages_sees_them(client: anthropic.AsyncAnthropic) -> None:
    counted = await client.messages.count_tokens(model="timed", messages=WEATHER, tools=TOOLS, system="Be kind.")
    sent = await client.messages.create(model="timed", max_tokens=1, messages=WEATHER, tools=TOOLS, system="Be kind.")
    assert counted.input_tokens == sent.usage.input_tokens + (sent.usage.cache_read_input_tokens or 0)


async def test_models(client: anthropic.AsyncAnthropic) -> None:
    page = await client.models.list()
    assert [(model.id, model.type) for model in page.data] == [("timed", "model")]


async def test_errors_are_the_sdks_own(client: anthropic.AsyncAnthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        await client.messages.create(model="other", max_tokens=5, messages=HELLO)
    body: Any = missing.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "not_found_error")
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    image: Any = {"role": "user", "content": [{"type": "image", "source": source}]}
    with pytest.raises(anthropic.BadRequestError, match=r"messages\.0\.content\.0.*'image'.*text only"):
        await client.messages.create(model="timed", max_tokens=5, messages=[image])
    with pytest.raises(anthropic.BadRequestError, match=r"tool_choice.*any"):
        await client.messages.create(
            model="timed", max_tokens=5, messages=HELLO, tools=TOOLS, tool_choice={"type": "any"}
        )
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: .* > 262144 maximum"):
        await client.messages.create(model="timed", max_tokens=5, messages=[{"role": "user", "content": "x" * 262_144}])
