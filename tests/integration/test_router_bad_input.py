"""Whatever a client sends: an answer in the API's own shape that names field, value and limit, and nothing held."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.router_stage import Connect, Stage, in_memory, stage

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


@asynccontextmanager
async def small(connect: Connect, **settings: Any) -> AsyncIterator[Stage]:
    async with stage(connect, "n0", body_limit_bytes=50_000, **settings) as s:
        yield s
        await s.settled()


@pytest.fixture
def memory() -> Connect:
    return in_memory()


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": HI, "max_tokens": 3, **fields}


def plain(**fields: Any) -> dict[str, Any]:
    return {"prompt": "hi", "max_tokens": 3, **fields}


BAD: list[tuple[str, Any, str | None, str]] = [
    (CHAT, b"{", None, "not a JSON object"),
    (CHAT, b"[1]", None, "not a JSON object"),
    (CHAT, b"\xff\xfe", None, "not a JSON object"),
    (CHAT, b'{"messages":' * 3000, None, "not a JSON object"),
    (CHAT, {}, None, "messages"),
    (CHAT, chat(messages=[]), "messages", "0 entries"),
    (CHAT, chat(messages="hi"), "messages", "array"),
    (CHAT, chat(messages=[{"role": "wizard", "content": "x"}]), "messages[0].role", "system"),
    (CHAT, chat(messages=[{"content": "x"}]), "messages[0].role", "must be one of"),
    (CHAT, chat(messages=[{"role": "user", "content": 5}]), "messages[0].content", "string"),
    (CHAT, chat(messages=[{"role": "user", "content": [5]}]), "messages[0].content[0]", "object"),
    (
        CHAT,
        chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]),
        "messages[0].content[0]",
        "image_url",
    ),
    (CHAT, chat(max_tokens=-1), "max_tokens", "-1"),
    (CHAT, chat(max_tokens=0), "max_tokens", "0"),
    (CHAT, chat(max_completion_tokens=0), "max_completion_tokens", "0"),
    (CHAT, chat(max_tokens="many"), "max_tokens", "'many'"),
    (CHAT, chat(max_tokens=1.5), "max_tokens", "1.5"),
    (CHAT, chat(max_tokens=3000), "max_tokens", "2048"),
    (CHAT, chat(temperature=2.5), "temperature", "2.5"),
    (CHAT, chat(temperature="hot"), "temperature", "'hot'"),
    (CHAT, chat(top_p=0), "top_p", "0"),
    (CHAT, chat(top_p=1.01), "top_p", "1.01"),
    (CHAT, chat(presence_penalty=-3), "presence_penalty", "-3"),
    (CHAT, chat(seed=1 << 64), "seed", ""),
    (CHAT, chat(stop=["x"] * 17), "stop", "16"),
    (CHAT, chat(stop=""), "stop", "0"),
    (CHAT, chat(stop=5), "stop", "5"),
    (CHAT, chat(stop_token_ids=[-4]), "stop_token_ids", "-4"),
    (CHAT, chat(n=2), "n", "must be 1, got 2"),
    (CHAT, chat(n=0), "n", "must be 1, got 0"),
    (CHAT, chat(logprobs=True), "logprobs", "not supported"),
    (CHAT, chat(tools=[{"type": "function"}]), "tools[0]", "not supported"),
    (CHAT, chat(response_format={"type": "json_object"}), "response_format", "not supported"),
    (CHAT, chat(logit_bias={"5": 1}), "logit_bias", "not supported"),
    (CHAT, chat(response_format={"type": "json_schema", "json_schema": {}}), "response_format", "json_schema"),
    (CHAT, chat(tools=[{"function": {"name": ""}}]), "tools[0].function.name", "1 to 128"),
    (CHAT, chat(tools=[{"function": {"name": "f"}}] * 2), "tools", "two functions named 'f'"),
    (CHAT, chat(tools=[{"function": {"name": "f"}}], tool_choice="required"), "tool_choice", "required"),
    (CHAT, chat(chat_template_kwargs={"messages": []}), "chat_template_kwargs", "messages"),
    (CHAT, chat(temperature=10**4000), "temperature", "out of range"),
    (CHAT, chat(stream="x" * 20_000), "stream", "xxx..."),
    (CHAT, chat(stream="yes"), "stream", "'yes'"),
    (CHAT, chat(stream_options=3), "stream_options", "3"),
    (PLAIN, plain(echo=True), "echo", "not supported"),
    (PLAIN, plain(best_of=3), "best_of", "must be 1, got 3"),
    (PLAIN, plain(suffix="x"), "suffix", "not supported"),
    (PLAIN, plain(prompt=""), "prompt", "0 tokens"),
    (PLAIN, plain(prompt=[]), "prompt", "0 tokens"),
    (PLAIN, plain(prompt=[1, "a"]), "prompt", "1 per request"),
    (PLAIN, plain(prompt=["a", "b"]), "prompt", "1 per request"),
    (PLAIN, plain(prompt=[1, -2]), "prompt", "-2"),
    (PLAIN, plain(prompt=[1 << 32]), "prompt", str(1 << 32)),
    (PLAIN, plain(prompt={"a": 1}), "prompt", "got"),
    (PLAIN, plain(prompt=[5] * 2048, max_tokens=1), "prompt", "2048"),
    (PLAIN, {"max_tokens": 3}, None, "prompt"),
    (PLAIN, b'{"prompt": "\\ud800", "max_tokens": 1}', None, ""),
    (PLAIN, plain(branch=7), "branch", "7"),
    (PLAIN, plain(branch={"id": ""}), "branch.id", "256"),
    (PLAIN, plain(branch={"id": "x" * 257}), "branch.id", "257"),
    (PLAIN, plain(branch={"id": "a", "parent": "a"}), "branch.parent", "own parent"),
    (PLAIN, plain(branch={"id": "a", "kind": "fork"}), "branch.kind", "parent"),
    (PLAIN, plain(branch={"id": "a", "kind": "cousin"}), "branch.kind", "'cousin'"),
    (PLAIN, plain(branch={"id": "a", "version": -1}), "branch.version", "-1"),
    (PLAIN, plain(branch={"id": "a", "end": "maybe"}), "branch.end", "'maybe'"),
    ("/tokenize", {}, "prompt", "one of"),
    ("/tokenize", {"prompt": "a", "messages": HI}, "prompt", "one of"),
    ("/detokenize", {"tokens": [-1]}, "tokens", "-1"),
    ("/v1/branches/b/events", {"type": "context"}, "type", "'context'"),
    ("/v1/branches/b/events", {"type": "fork"}, "parent", "needs"),
    ("/v1/branches/b/events", {"type": "compact", "version": -1}, "version", "-1"),
    ("/v1/cluster/split", {"split": "many"}, "split", "'many'"),
]


async def test_bad_fields_are_refused_by_name(memory: Connect) -> None:
    async with small(memory) as s:
        for path, body, param, text in BAD:
            reply = await s.post(path, body)
            told = f"{path} {body!r:.80}: {reply.body}"
            assert reply.status == 400, told
            assert set(reply.error) == {"message", "type", "param", "code"}, told
            assert reply.error["type"] == "invalid_request_error", told
            assert reply.error["param"] == param, told
            assert text in reply.error["message"], told
            assert "Traceback" not in json.dumps(reply.body)
            assert s.router.core.requests == {}, told


async def test_unknown_fields_are_accepted(memory: Connect) -> None:
    async with small(memory) as s:
        body = chat(
            user="u", metadata={"a": 1}, service_tier="auto", thinking={"type": "x"}, n=1, tools=[], logprobs=False
        )
        assert (await s.post(CHAT, body)).status == 200


async def test_nulls_mean_not_given(memory: Connect) -> None:
    async with small(memory) as s:
        names = (
            "temperature",
            "top_p",
            "stop",
            "seed",
            "stream",
            "stream_options",
            "n",
            "tools",
            "logit_bias",
            "branch",
        )
        assert (await s.post(CHAT, chat(**dict.fromkeys(names)))).status == 200


async def test_unknown_model(memory: Connect) -> None:
    async with small(memory) as s:
        reply = await s.post(CHAT, chat(model="gpt-9"))
        assert (reply.status, reply.error["code"], reply.error["param"]) == (404, "model_not_found", "model")
        assert "'timed'" in reply.error["message"]


async def test_unknown_routes_are_refused_in_the_apis_own_shape(memory: Connect) -> None:
    async with small(memory) as s:
        for path, method in (("/v1/nothing", "GET"), (PLAIN, "GET"), ("/v1/cluster", "DELETE")):
            reply = await s.get(path, method)
            assert (reply.status, reply.error["code"]) == (404, "unknown_route")


async def test_body_over_the_limit(memory: Connect) -> None:
    async with small(memory) as s:
        reply = await s.post(PLAIN, plain(prompt="x" * 60_000))
        assert (reply.status, reply.error["code"]) == (413, "too_large")
        assert "50000" in reply.error["message"]


async def test_headers_are_checked_as_the_body_is(memory: Connect) -> None:
    async with small(memory) as s:
        bad = {"x_ei_branch_kind": "fork"}, {"x_ei_branch_version": "two"}, {"x_ei_branch_end": "perhaps"}
        for headers in bad:
            reply = await s.post(PLAIN, plain(), x_ei_branch_id="b", **headers)
            assert reply.status == 400
            assert reply.error["param"].startswith("x-ei-branch-")


async def test_api_keys(memory: Connect, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text('[[keys]]\nkey = "one"\ntenant = "acme"\n[[keys]]\nkey = "root"\nadmin = true\n')
    async with small(memory, keys_file=str(file)) as s:
        missing = await s.post(PLAIN, plain())
        assert (missing.status, missing.error["type"]) == (401, "authentication_error")
        wrong = await s.post(PLAIN, plain(), authorization="Bearer nope")
        assert (wrong.status, wrong.error["code"]) == (401, "invalid_api_key")
        assert "nope" not in json.dumps(wrong.body)
        assert (await s.post(PLAIN, plain(), authorization="Bearer one")).status == 200
        assert (await s.post(PLAIN, plain(), x_api_key="root")).status == 200
        order = await s.post("/v1/cluster/split", {"split": "1P1D"}, authorization="Bearer one")
        assert (order.status, order.error["code"]) == (403, "admin_only")


async def test_limit_of_open_requests(memory: Connect) -> None:
    async with small(memory, max_open_requests=1) as s:
        spec = s.router.core.limits
        assert spec.max_open_requests == 1
        s.router.core.requests["held"] = object()  # type: ignore[assignment]  # only counted
        reply = await s.post(PLAIN, plain())
        del s.router.core.requests["held"]
        assert (reply.status, reply.error["code"]) == (429, "too_many_requests")
        assert reply.headers["retry-after"] == "1"


HUGE = "x" * 20_000
ECHOES: list[tuple[str, Any]] = [
    (CHAT, {"messages": HUGE}),
    (CHAT, chat(messages=[{"role": HUGE, "content": "x"}])),
    (CHAT, chat(messages=[{"role": "user", "content": [{"type": HUGE}]}])),
    (CHAT, chat(model=HUGE)),
    (CHAT, chat(response_format=HUGE)),
    (CHAT, chat(tools=[{"function": {"name": "f"}}], tool_choice=HUGE)),
    (CHAT, chat(tools=[{"type": HUGE}])),
    (CHAT, chat(n=HUGE)),
    (CHAT, chat(branch={"id": "a", "kind": HUGE})),
    ("/v1/messages", {"messages": [{"role": HUGE, "content": "x"}], "max_tokens": 3}),
    ("/v1/messages", {"messages": HI, "max_tokens": 3, "tool_choice": HUGE}),
    ("/v1/responses", {"input": [{"type": HUGE}]}),
    ("/v1/responses", {"input": "x", "text": {"format": HUGE}}),
    ("/v1/cluster/split", {"split": HUGE}),
    ("/detokenize", {"tokens": [10**400]}),
]


async def test_huge_values_are_not_echoed(memory: Connect) -> None:
    async with small(memory) as s:
        for path, body in ECHOES:
            reply = await s.post(path, body)
            assert 400 <= reply.status < 500, (path, reply.body)
            assert len(reply.error["message"]) < 300, path
