"""Images in every dialect: counted as the model's own processor lays them out, keyed by what they show, carried."""

import asyncio
import base64
import hashlib
import shutil
import time
from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from schemas.phase import Phase
from schemas.subjects import Subjects
from schemas.telemetry import ITERATION_BATCH, REQUEST_TELEMETRY, Iteration, RequestTelemetry
from services.bus import Delivery
from tests.cluster import Cluster
from tests.engine_cluster import until
from tests.router_stage import Stage, in_memory, stage
from tests.vision_model import TEMPLATE, data_url, picture, write_model

pytestmark = [
    pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed (extra `engine`)"),
    pytest.mark.timeout(180),
    pytest.mark.asyncio(loop_scope="module"),
]
CAT, DOG = picture(1), picture(2, 128, 64)
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("vision"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def seeing(model: Path) -> AsyncIterator[Stage]:
    """A router and an engine of a model that takes images, one for all tests: its processor takes seconds to load."""
    async with stage(in_memory(), "n0", tokenizer=str(model), image_limit_bytes=4000, images_limit=2) as s:
        yield s


def url(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data), "detail": "low"}}


def block(data: bytes) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(data).decode()}
    return {"type": "image", "source": source}


def chat(*parts: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 3, "ignore_eos": True, **fields}


async def test_every_dialect_says_the_same_image_in_the_same_tokens(seeing: Stage) -> None:
    text = {"type": "text", "text": "what is this?"}
    asked = await asyncio.gather(
        seeing.post(CHAT, chat(text, url(CAT))),
        seeing.post(MESSAGES, chat(text, block(CAT))),
        seeing.post(
            RESPONSES,
            {
                "input": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "input_text", "text": "what is this?"},
                            {"type": "input_image", "image_url": data_url(CAT)},
                        ],
                    }
                ],
                "max_output_tokens": 3,
            },
        ),
        seeing.post("/v1/messages/count_tokens", chat(text, block(CAT))),
        seeing.post("/tokenize", {"messages": chat(text, url(CAT))["messages"]}),
    )
    assert [reply.status for reply in asked] == [200] * 5, [reply.body for reply in asked]
    openai, anthropic, responses, counted, tokens = (reply.body for reply in asked)
    count = openai["usage"]["prompt_tokens"]
    assert anthropic["usage"]["input_tokens"] + anthropic["usage"]["cache_read_input_tokens"] == count
    assert responses["usage"]["input_tokens"] == counted["input_tokens"] == tokens["count"] == count
    assert (await seeing.get("/v1/models")).body["data"][0]["images"] == {"supported": True}
    words = (await seeing.post("/tokenize", {"messages": chat(text)["messages"]})).body["count"]
    assert count - words > 9 * 5, "four tiles and the whole, of nine tokens each"


async def test_the_engine_gets_the_bytes_and_knows_where_they_stand(
    seeing: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    legs: list[Any] = []
    backend = seeing.engines["n0"].backend
    submit = backend.submit
    monkeypatch.setattr(backend, "submit", lambda leg: (legs.append(leg), submit(leg))[1])
    assert (await seeing.post(CHAT, chat(url(DOG), url(CAT)))).status == 200
    assert {leg.key.phase for leg in legs} == {"prefill", "decode"}
    for leg in legs:
        assert leg.data == (DOG, CAT)
        assert [medium.sha256 for medium in leg.media] == [hashlib.sha256(data).digest() for data in leg.data]
        first, second = leg.media
        assert first.first + first.tokens <= second.first < leg.prompt_tokens


async def test_requests_and_iterations_say_how_many_images_were_looked_at(seeing: Stage) -> None:
    subjects, bus = Subjects(), await seeing.connect()
    ended: list[RequestTelemetry] = []
    ran: list[Iteration] = []
    begun = time.time()

    async def on_request(delivery: Delivery) -> None:
        request = REQUEST_TELEMETRY.decode(delivery.data)
        if request.t_arrive >= begun:
            ended.append(request)

    async def on_iterations(delivery: Delivery) -> None:
        ran.extend(one for one in ITERATION_BATCH.decode(delivery.data).iterations if one.t >= begun)

    await bus.subscribe(subjects.telemetry_request("*"), on_request)
    await bus.subscribe(subjects.telemetry_iteration("*"), on_iterations)
    shown = chat({"type": "text", "text": "y" * 200}, url(CAT), url(DOG))
    for _ in range(2):
        assert (await seeing.post(CHAT, shown)).status == 200
    await until(lambda: len(ended) == 2 and sum(one.phase is Phase.PREFILL for one in ran) == 2)
    assert [request.media for request in ended] == [2, 0], "the second time both are cached"
    assert [one.media for one in ran if one.phase is Phase.PREFILL] == [2, 0]


async def test_keys_follow_from_what_is_shown_and_what_comes_before_is_shared(seeing: Stage) -> None:
    lead = {"type": "text", "text": "x" * 200}
    first = await seeing.post(CHAT, chat(lead, url(CAT)))
    again = await seeing.post(CHAT, chat(lead, url(CAT)))
    other = await seeing.post(CHAT, chat(lead, url(picture(3))))
    cached = [reply.body["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in (first, again, other)]
    count = first.body["usage"]["prompt_tokens"]
    assert cached[0] < 16, "what every prompt begins with"
    assert count - 16 <= cached[1] < count
    assert 200 <= cached[2] < 224, "what stands before the image's first placeholder"


REFUSED: list[tuple[str, Any, int, str]] = [
    (CHAT, chat({"type": "image_url"}), 400, "messages[0].content[0] has no image URL"),
    (CHAT, chat({"type": "image_url", "image_url": {"url": "http://10.0.0.1/x.png"}}), 400, "images are not fetched"),
    (CHAT, chat({"type": "image_url", "image_url": "file:///etc/passwd"}), 400, "images are not fetched"),
    (CHAT, chat({"type": "image_url", "image_url": "data:image/png,x"}), 400, "a data URL is expected"),
    (CHAT, chat({"type": "image_url", "image_url": "data:image/png;base64,*"}), 400, "is not base64"),
    (CHAT, chat({"type": "image_url", "image_url": "data:image/png;base64,AAAA"}), 400, "is no PNG, JPEG"),
    (CHAT, chat(url(CAT), url(CAT), url(CAT)), 400, "is image number 3, the limit is 2 images"),
    (CHAT, chat(url(b"x" * 6000)), 413, "has 6000 bytes, the limit of an image is 4000 bytes"),
    (CHAT, chat(url(CAT), {"type": "text", "text": "<image>"}), 400, "a text says <image>"),
    (CHAT, {"messages": [{"role": "system", "content": [url(CAT)]}]}, 400, "messages of users"),
    (MESSAGES, chat({"type": "image", "source": {"type": "file"}}), 400, "messages.0.content.0.source of type 'file'"),
    (MESSAGES, chat({"type": "image", "source": {"type": "url", "url": "https://a/b"}}), 400, "not fetched"),
    (MESSAGES, chat({"type": "document"}), 400, "files are not read"),
]


async def test_what_is_not_taken_is_named_with_value_and_limit(seeing: Stage) -> None:
    for path, body, status, words in REFUSED:
        reply = await seeing.post(path, body)
        assert (reply.status, words in reply.error["message"]) == (status, True), (body, reply.body)


async def test_images_of_a_tools_result_are_shown_after_it(seeing: Stage) -> None:
    use = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "done"}, block(CAT)]}
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result, {"type": "text", "text": "so?"}]},
    ]
    reply = await seeing.post("/v1/messages/count_tokens", {"messages": messages})
    assert reply.status == 200, reply.body
    result["content"] = "done"
    without = await seeing.post("/v1/messages/count_tokens", {"messages": messages})
    assert reply.body["input_tokens"] - without.body["input_tokens"] > 9 * 5


async def test_a_cluster_finds_what_holds_an_image_again(model: Path) -> None:
    """Through pool, directory and another node: the image, and the block that the answer to it completes."""
    asked = chat({"type": "text", "text": "y" * 90}, url(CAT), max_tokens=40)
    sent = {"x-ei-branch-id": "seen"}
    async with Cluster.up("--engine", "timed", "--nodes", "3", "--model", str(model)) as cluster:

        async def ask(messages: list[Any]) -> tuple[str, int, int]:
            body = asked | {"messages": messages}
            async with cluster.session.post(cluster.url + CHAT, json=body, headers=sent) as reply:
                found = await reply.json()
                assert reply.status == 200, found
            await asyncio.sleep(0.5)
            usage = found["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            return found["choices"][0]["message"]["content"], usage["prompt_tokens"], cached

        messages, before = list(asked["messages"]), 0
        for turn in range(3):
            answer, count, cached = await ask(messages)
            if turn:
                assert cached > before, "the whole of the former prompt, and of its answer"
            before = count
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "go on"}]
        messages[0] = {"role": "user", "content": [{"type": "text", "text": "y" * 90}, url(DOG)]}
        _, _, cached = await ask(messages)
        assert 80 <= cached <= 112, "the words before another image"


@pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed (extra `engine`)")
async def test_what_a_first_request_would_wait_for_starts_with_the_router(model: Path, tmp_path: Path) -> None:
    """A model whose template says tools has parsers ready, one with a processor has that; others start nothing."""
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    tools = "{% for tool in tools or [] %}<tool_call>{{ tool.function.name }}</tool_call>{% endfor %}"
    (folder / "chat_template.jinja").write_text(tools + TEMPLATE)
    async with (
        stage(in_memory(), "n0", tokenizer=str(folder), tool_parser="hermes") as s,
        stage(in_memory(), "n0") as plain,
    ):
        await until(lambda: s.router.parsers.running, 30)
        await until(lambda: s.router.images.running, 120)
        assert not plain.router.parsers.running
        assert not plain.router.images.running
