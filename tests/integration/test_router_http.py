"""The router's HTTP against real timed engines: answers, streams, usage, headers."""

import json

from openai import AsyncOpenAI

from schemas.phase import Phase
from tests.router_stage import Connect, Reply, Stage, stage

PROMPT = list(range(65, 105))


async def both(s: Stage, prompt: list[int], tokens: int, **body: object) -> tuple[Reply, Reply]:
    """The same completion whole and streamed."""
    whole = await s.complete(prompt, tokens, **body)
    streamed = await s.complete(prompt, tokens, stream=True, stream_options={"include_usage": True}, **body)
    assert (whole.status, streamed.status) == (200, 200), (whole.body, streamed.body)
    return whole, streamed


async def test_whole_and_streamed_completions_are_the_same(connect: Connect) -> None:
    async with stage(connect, "n0") as s:
        whole, streamed = await both(s, PROMPT, 5)
        assert whole.tokens == streamed.tokens
        assert len(whole.tokens) == 5
        assert (whole.finish, streamed.finish) == ("length", "length")
        text = "".join(choice["text"] for part in streamed.events for choice in part["choices"])
        assert text == whole.body["choices"][0]["text"] == bytes(whole.tokens).decode()
        assert streamed.body.endswith("data: [DONE]\n\n")
        assert streamed.headers["Content-Type"].startswith("text/event-stream")
        await s.settled()


async def test_headers_say_where_the_request_went(connect: Connect) -> None:
    async with stage(connect) as s:
        await s.engine("p1", phase=Phase.PREFILL)
        await s.engine("d1", phase=Phase.DECODE)
        reply = await s.post(
            "/v1/completions", {"prompt": PROMPT, "max_tokens": 3}, x_ei_branch_id="b1", x_request_id="mine"
        )
        headers = reply.headers
        assert (headers["x-ei-prefill-node"], headers["x-ei-decode-node"]) == ("p1", "d1")
        assert (headers["x-ei-branch-id"], headers["x-ei-branch-version"]) == ("b1", "0")
        assert (headers["x-ei-cached-tokens"], headers["x-request-id"]) == ("0", "mine")
        assert reply.body["id"].startswith("cmpl-mine-")
        await s.settled()


async def usage_of(s: Stage, prompt: list[int]) -> dict[str, object]:
    whole = await s.complete(prompt, 5)
    return dict(whole.usage)


async def test_case_87_cold_request_reports_nothing_cached(connect: Connect) -> None:
    for phases in ((Phase.BOTH,), (Phase.PREFILL, Phase.DECODE)):
        async with stage(connect) as s:
            for number, phase in enumerate(phases):
                await s.engine(f"{phase}-{number}", phase=phase)
            streamed = await s.complete(PROMPT, 5, stream=True, stream_options={"include_usage": True})
            expected = {
                "prompt_tokens": 40,
                "completion_tokens": 5,
                "total_tokens": 45,
                "prompt_tokens_details": {"cached_tokens": 0},
            }
            assert streamed.usage == expected
            other = [token + 1 for token in PROMPT]
            assert await usage_of(s, other) == expected
            again = await s.complete(other, 5)
            assert again.usage["prompt_tokens_details"] == {"cached_tokens": 36}


async def test_chat_renders_the_template(connect: Connect) -> None:
    async with stage(connect, "n0") as s:
        messages = [{"role": "user", "content": "hi"}]
        tokens = (await s.post("/tokenize", {"messages": messages})).body["tokens"]
        body = {"messages": messages, "max_tokens": 4, "ignore_eos": True, "return_token_ids": True}
        chat = await s.post("/v1/chat/completions", body)
        plain = await s.complete(tokens, 4)
        assert chat.tokens == plain.tokens
        assert chat.usage["prompt_tokens"] == len(tokens)
        message = chat.body["choices"][0]["message"]
        assert message == {"role": "assistant", "content": bytes(chat.tokens).decode()}
        assert chat.body["object"] == "chat.completion"


async def test_openai_client_reads_answers_and_streams(connect: Connect) -> None:
    async with stage(connect, "n0") as s:
        async with AsyncOpenAI(base_url=f"{s.url}/v1", api_key="none", max_retries=0) as client:
            models = await client.models.list()
            name = models.data[0].id
            whole = await client.chat.completions.create(
                model=name, messages=[{"role": "user", "content": "hi"}], max_completion_tokens=6
            )
            stream = await client.chat.completions.create(
                model=name,
                messages=[{"role": "user", "content": "hi"}],
                max_completion_tokens=6,
                stream=True,
                stream_options={"include_usage": True},
            )
            text, usage, role = "", None, None
            async for chunk in stream:
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    role = choice.delta.role or role
                    text += choice.delta.content or ""
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 6
        assert text == whole.choices[0].message.content
        assert role == "assistant"
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        assert usage.prompt_tokens_details.cached_tokens is not None


async def test_stop_string_ends_the_answer_upstream(connect: Connect) -> None:
    async with stage(connect, "n0") as s:
        full = bytes((await s.complete(PROMPT, 40)).tokens).decode()
        stop = full[10:13]
        at = full.find(stop)
        for stream in (False, True):
            body = {"prompt": PROMPT, "max_tokens": 1900, "ignore_eos": True, "stop": ["never", stop], "stream": stream}
            reply = await s.post("/v1/completions", body)
            parts = reply.events or [reply.body]
            text = "".join(choice["text"] for part in parts for choice in part["choices"])
            assert text == full[:at]
            assert reply.finish == "stop"
        await s.settled()


async def test_stop_token_is_not_text(connect: Connect) -> None:
    async with stage(connect, "n0") as s:
        full = (await s.complete(PROMPT, 30)).tokens
        stop = full[12]
        at = full.index(stop)
        body = {"prompt": PROMPT, "max_tokens": 30, "stop_token_ids": [stop], "return_token_ids": True}
        for stream in (False, True):
            reply = await s.post("/v1/completions", body | {"stream": stream})
            parts = reply.events or [reply.body]
            text = "".join(choice["text"] for part in parts for choice in part["choices"])
            assert reply.tokens == full[: at + 1]
            assert text == bytes(full[:at]).decode()
            assert reply.finish == "stop"


async def test_one_token_answer(connect: Connect) -> None:
    async with stage(connect) as s:
        await s.engine("p1", phase=Phase.PREFILL)
        await s.engine("d1", phase=Phase.DECODE)
        whole, streamed = await both(s, PROMPT, 1)
        assert whole.tokens == streamed.tokens
        assert len(whole.tokens) == 1
        assert whole.usage["completion_tokens"] == 1
        await s.settled()


async def test_tokenize_and_back(connect: Connect) -> None:
    async with stage(connect, "n0") as s:
        text = "héllo 😀"
        reply = await s.post("/tokenize", {"prompt": text})
        assert reply.body["tokens"] == list(text.encode())
        assert (reply.body["count"], reply.body["max_model_len"]) == (11, 2048)
        back = await s.post("/detokenize", {"tokens": reply.body["tokens"]})
        assert back.body == {"text": text}


async def test_models_version_and_cluster(connect: Connect) -> None:
    async with stage(connect) as s:
        await s.engine("p1", phase=Phase.PREFILL)
        await s.engine("d1", phase=Phase.DECODE)
        assert [model["id"] for model in (await s.get("/v1/models")).body["data"]] == ["timed"]
        assert (await s.get("/v1/models/timed")).body["max_model_len"] == 2048
        assert (await s.get("/v1/models/other")).status == 404
        assert (await s.get("/version")).body["version"]
        shown = (await s.get("/v1/cluster")).body
        assert shown["split"] == "1P1D"
        assert [(n["node"], n["phase"], n["alive"]) for n in shown["nodes"]] == [
            ("d1", "decode", True),
            ("p1", "prefill", True),
        ]
        assert (await s.get("/ready")).status == 200


async def test_ready_needs_both_phases(connect: Connect) -> None:
    async with stage(connect) as s:
        await s.engine("p1", phase=Phase.PREFILL)
        reply = await s.get("/ready")
        assert (reply.status, reply.body["reasons"]) == (503, ["no live node serves decode"])
        refused = await s.complete(PROMPT, 3)
        assert (refused.status, refused.error["code"]) == (503, "no_decode_node")
        assert int(refused.headers["Retry-After"]) >= 1
        await s.settled()


async def test_metrics_count_what_happened(connect: Connect) -> None:
    async with stage(connect, "n0") as s:
        await s.complete(PROMPT, 5)
        async with s.http.get(s.url + "/metrics") as response:
            text = await response.text()
        assert 'ei_router_requests_total{outcome="length"} 1.0' in text
        assert 'ei_router_prompt_tokens_total{source="uncached"} 40.0' in text
        assert "ei_router_output_tokens_total 5.0" in text
        assert "ei_router_ttft_seconds_count 1.0" in text
        assert "ei_router_open_requests_count 0.0" in text


async def test_case_43_prompt_larger_than_a_message(connect: Connect) -> None:
    limits = {"l1_tokens": 1 << 19, "max_context_tokens": 1 << 18}
    async with stage(connect) as s:
        await s.engine("n0", **limits)
        for tokens in (209_714, 209_716):
            body = {"prompt": [65_536 + number % 7 for number in range(tokens)], "max_tokens": 2, "ignore_eos": True}
            reply = await s.post("/v1/completions", json.dumps(body).encode())
            assert reply.status == 200, reply.body
            assert reply.usage["prompt_tokens"] == tokens
        await s.settled()
