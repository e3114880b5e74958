"""Images through a whole cluster of real SGLang engines: greedy answers equal one plain SGLang's to the same request,
and KV is found again exactly as far as the same images stand in the same places."""

import asyncio
import base64
import hashlib
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import pytest
from tokenizers import Tokenizer

from schemas.media import Medium
from schemas.serve import Sampling
from schemas.subjects import Subjects
from schemas.telemetry import ITERATION_BATCH
from services.bus import Delivery
from services.cli.cluster.rundir import run_path
from services.cli.connection import find_target
from services.engine.sglang.config import SglangSettings
from services.engine.sglang.plain import PlainEngine
from tests.cluster import Cluster
from tests.e2e.sglang_needed import NEEDS_SGLANG
from tests.e2e.sglang_vision import LLAVA, QWEN, Seeing
from tests.vision_model import data_url, picture

BLOCK, NEW = 16, 24
GREEDY = Sampling(max_new_tokens=NEW, temperature=0, ignore_eos=True)
LEAD = "Look at this picture closely, and then say what it shows: "
CAT, DOG = picture(10, 128, 128), picture(250, 128, 128)
SMALL = picture(90, 128, 64, right=200)
LONG = "Here it is: " * 20
"""So far that the image after it lies on both sides of the end of a prefill chunk (256 tokens)."""


@dataclass(frozen=True)
class Asked:
    """A conversation as it was sent, and what came back."""

    messages: list[dict[str, Any]]
    answer: str
    prompt_tokens: int
    cached_tokens: int
    prefill_node: str
    decode_node: str

    @property
    def computed(self) -> int:
        """Tokens of the prompt and of the answer whose KV was computed, in full blocks."""
        return (self.prompt_tokens + NEW - 1) // BLOCK * BLOCK

    def then(self, *parts: str | bytes) -> list[dict[str, Any]]:
        """The conversation with its answer, and what the user says next."""
        return [*self.messages, {"role": "assistant", "content": self.answer}, user(*parts)]


@dataclass
class Talk:
    """A cluster, everything it was asked, and how many images its nodes said that they looked at."""

    cluster: Cluster
    told: list[Asked] = field(default_factory=list)
    looked_at: int = 0

    async def ask(self, messages: list[dict[str, Any]], branch: str) -> Asked:
        body = {"messages": messages, "max_tokens": NEW, "temperature": 0, "ignore_eos": True}
        url, sent = self.cluster.url + "/v1/chat/completions", {"x-ei-branch-id": branch}
        async with self.cluster.session.post(url, json=body, headers=sent) as reply:
            found = await reply.json()
            assert reply.status == 200, found
            nodes = reply.headers["x-ei-prefill-node"], reply.headers["x-ei-decode-node"]
        text, usage = found["choices"][0]["message"]["content"], found["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        asked = Asked(messages, text, usage["prompt_tokens"], cached, *nodes)
        self.told.append(asked)
        await asyncio.sleep(1.0)  # what it left behind has reached the directory
        return asked

    async def on_iterations(self, delivery: Delivery) -> None:
        self.looked_at += sum(one.media for one in ITERATION_BATCH.decode(delivery.data).iterations)


def on_its_side(data: bytes) -> bytes:
    """The same picture, turned, in a file that says how to turn it back."""
    from PIL import Image

    target, said = io.BytesIO(), Image.Exif()
    said[0x0112] = 6
    Image.open(io.BytesIO(data)).transpose(Image.Transpose.ROTATE_90).save(target, "PNG", exif=said)
    return target.getvalue()


def user(*parts: str | bytes) -> dict[str, Any]:
    """A message of texts and images."""
    shown = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": data_url(on_its_side(part) if part == SMALL else part)}}
        for part in parts
    ]
    return {"role": "user", "content": shown}


pytestmark = [NEEDS_SGLANG, pytest.mark.e2e, pytest.mark.timeout(400)]


@asynccontextmanager
async def talk_of(seeing: Seeing, folder: Path, nodes: int) -> AsyncIterator[Talk]:
    """A cluster to talk to. Afterwards every answer is held against one plain engine's, and no engine said that it keys
    images otherwise than the router."""
    model = seeing.write(folder)
    up = ("--engine", "sglang", "--nodes", str(nodes), "--model", str(model))
    plain = PlainEngine(SglangSettings(model_path=str(model)), folder=model)
    starting = asyncio.create_task(plain.start())
    try:
        async with Cluster.up(*up, ready_s=240) as cluster, find_target(cluster.port).bus() as bus:
            talk = Talk(cluster)
            await bus.subscribe(Subjects().telemetry_iteration("*"), talk.on_iterations)
            yield talk
            logs = list((run_path(cluster.port) / "logs").glob("engine-*.log"))
            assert len(logs) == nodes
            assert not [log for log in logs if "not found again" in log.read_text()]
        await starting
        await equal_to(plain, seeing, model, talk.told)
    finally:
        await plain.stop()


async def test_images_go_from_node_to_node_and_are_found_again(tmp_path: Path) -> None:
    async with talk_of(QWEN, tmp_path, nodes=2) as talk:
        cold = await one_image_and_another(talk, QWEN)
        assert (cold.prefill_node, cold.decode_node) == ("node-0", "node-1")
        second = await second_turn(talk)
        await talk.cluster.command("phase", "node-1", "both")
        await talk.cluster.command("phase", "node-0", "decode")
        third = await third_turn(talk, second)
        assert third.prefill_node == "node-1", "which reads what node-0 wrote from its pool"


async def test_an_image_of_several_rows_is_found_again(tmp_path: Path) -> None:
    async with talk_of(LLAVA, tmp_path, nodes=1) as talk:
        await one_image_and_another(talk, LLAVA)
        await third_turn(talk, await second_turn(talk))


async def one_image_and_another(talk: Talk, seeing: Seeing) -> Asked:
    """The same image is found again in full; another one of the same size is not, what stands before it is."""
    cold = await talk.ask([user(LEAD, CAT, "?")], "cold")
    assert cold.cached_tokens == 0
    again = await talk.ask([user(LEAD, CAT, "?")], "again")
    assert again.cached_tokens == (again.prompt_tokens - 1) // BLOCK * BLOCK
    assert again.answer == cold.answer
    other = await talk.ask([user(LEAD, DOG, "?")], "other")
    assert other.prompt_tokens == cold.prompt_tokens
    lead = len("<") + len("user\n") + len(LEAD) + seeing.before
    assert other.cached_tokens == lead // BLOCK * BLOCK
    assert other.answer != cold.answer, "a model that does not look shows nothing here"
    return cold


async def second_turn(talk: Talk) -> Asked:
    """A conversation goes on with one more image, of another size, that lies on its side in its file."""
    talk.looked_at = 0
    first = await talk.ask([user(LONG, DOG, "and that")], "talk")
    second = await talk.ask(first.then("and this ", SMALL, "what of both?"), "talk")
    assert second.cached_tokens == first.computed
    assert talk.looked_at == 2, "each image once, although the first one is in two chunks and in both prompts"
    return second


async def third_turn(talk: Talk, second: Asked) -> Asked:
    """The conversation goes on with text alone, while others show images of their own."""
    third, *_ = await asyncio.gather(
        talk.ask(second.then("so?"), "talk"),
        talk.ask([user("1: ", SMALL, CAT)], "aside"),
        talk.ask([user("2: ", CAT, SMALL)], "beside"),
    )
    assert third.cached_tokens == second.computed
    return third


async def equal_to(plain: PlainEngine, seeing: Seeing, model: Path, told: list[Asked]) -> None:
    """Every answer is the plain engine's, which is given what the template says and the images themselves."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    placeholder = tokenizer.token_to_id(seeing.placeholder)
    assert placeholder is not None
    for asked in told:
        prompt = tokenizer.encode(rendered(seeing.template, asked.messages)).ids
        images = images_of(asked.messages)
        stand = [at for at, token in enumerate(prompt) if token == placeholder]
        media = [
            Medium(at, 1, hashlib.sha256(data).digest(), len(data), placeholder)
            for at, data in zip(stand, images, strict=True)
        ]
        answer = await plain.generate(prompt, GREEDY, media, images)
        assert tokenizer.decode(answer.tokens) == asked.answer


def rendered(template: str, messages: list[dict[str, Any]]) -> str:
    """What a model's template makes of the messages."""
    kinds = {"text": "text", "image_url": "image"}
    said = [
        message | {"content": [part | {"type": kinds[part["type"]]} for part in message["content"]]}
        if isinstance(message["content"], list)
        else message
        for message in messages
    ]
    made = jinja2.Template(template, keep_trailing_newline=True)
    return str(made.render(messages=said, add_generation_prompt=True))


def images_of(messages: list[dict[str, Any]]) -> list[bytes]:
    """The images as they were shown."""
    parts = [part for message in messages if message["role"] == "user" for part in message["content"]]
    urls = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
    sent = [base64.b64decode(url.partition(",")[2]) for url in urls]
    return [SMALL if data == on_its_side(SMALL) else data for data in sent]
