"""Answers on their way to a client: tokens once and in order, writes, clients that go or take nothing."""

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from schemas.block_key import token_bytes
from services.router.api.answer import AnswerResponse, Job
from services.router.api.openai_response import ChatShape, CompletionShape, Head
from services.router.api.reader import PlainReader
from services.router.api.vigil import Patience
from services.router.calls import Call
from services.router.core.answer import Answer
from services.router.core.effects import End, Outcome, Placed, Record
from services.router.core.failure import Failure, unavailable
from services.router.text.byte_tokenizer import byte_tokenizer
from services.router.text.stream import TextStream

HEAD = Head("cmpl-1", 1, "m")
LIBRARY = byte_tokenizer()


def record(outcome: Outcome = Outcome.LENGTH, output: int = 2) -> Record:
    return Record(
        request="r",
        branch=None,
        version=None,
        outcome=outcome,
        arrived=0,
        ended=1,
        placed=0,
        fetched=None,
        prefill_started=None,
        first_token=0.5,
        prompt_tokens=40,
        cached_tokens=36,
        restored_tokens=0,
        known_tokens=36,
        output_tokens=output,
        prefill_node="p",
        decode_node="d",
        attempts=1,
        ttft_predicted_s=None,
        blind=False,
        lineage="",
    )


@dataclass
class Control:
    """Cancels and stops as the dispatcher would."""

    cancelled: list[str] = field(default_factory=list)

    def cancel(self, call: Call, reason: str) -> None:
        if call.end is None:
            self.cancelled.append(reason)
            call.ended(End(record(Outcome.CANCELLED), Failure(499, "cancelled", "gone")))

    def stop(self, call: Call) -> None:
        call.ended(End(record(Outcome.STOP)))


@dataclass
class Client:
    """An ASGI peer: `stuck` takes nothing after the headers; `leave` makes it disconnect."""

    stuck: bool = False
    sent: list[dict[str, Any]] = field(default_factory=list)
    leave: asyncio.Event = field(default_factory=asyncio.Event)

    async def receive(self) -> Any:
        await self.leave.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if self.stuck and message["type"] == "http.response.body":
            await asyncio.Event().wait()
        self.sent.append(message)

    @property
    def bodies(self) -> list[bytes]:
        return [m["body"] for m in self.sent if m["type"] == "http.response.body"]


def job(call: Call, *, stream: bool = True, stops: tuple[str, ...] = (), chat: bool = False, **more: Any) -> Job:
    shape = ChatShape(HEAD, include_usage=True) if chat else CompletionShape(HEAD)
    reader = PlainReader(TextStream(LIBRARY, stops), frozenset())
    return Job(call, shape, reader, stream=stream, request_id="mine", **more)


async def answer(job: Job, client: Client, control: Control, idle_s: float = 5.0) -> None:
    patience = Patience(keep_alive_s=5.0, idle_client_s=idle_s)
    async with asyncio.timeout(5):
        await AnswerResponse(job, control, patience)({}, client.receive, client.send)


def texts(bodies: list[bytes]) -> list[str]:
    lines = b"".join(bodies).decode().splitlines()
    data = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return [choice["text"] for part in data for choice in part["choices"] if choice["text"]]


def test_tokens_are_taken_once_and_in_order() -> None:
    got = Answer(limit=5)
    assert got.take(0, token_bytes([1, 2])) == [1, 2]
    assert got.take(0, token_bytes([1, 2, 3])) == [3]
    assert got.take(1, token_bytes([2])) == []
    assert (got.take(4, token_bytes([5])), got.gap) == ([], True)
    assert (got.take(3, token_bytes([4, 5, 6])), got.gap) == ([4, 5], False)
    got.check()


def test_end_before_the_last_tokens_is_a_gap() -> None:
    got = Answer(limit=9)
    got.take(0, token_bytes([1]))
    got.ends_at(3)
    assert (got.complete, got.gap) == (False, True)
    assert got.take(1, token_bytes([2, 3, 4])) == [2, 3]
    assert got.complete
    got.reopen()
    assert not got.complete


async def test_client_that_takes_nothing_is_cancelled() -> None:
    call, client, control = Call("r"), Client(stuck=True), Control()
    call.push([104])
    await answer(job(call), client, control, idle_s=0.05)
    assert control.cancelled == ["idle"]


async def test_client_that_goes_is_cancelled() -> None:
    for stream in (True, False):
        call, client, control = Call("r"), Client(), Control()
        running = asyncio.ensure_future(answer(job(call, stream=stream), client, control))
        await asyncio.sleep(0)
        client.leave.set()
        await running
        assert control.cancelled == ["gone"]


async def test_one_write_per_message_of_the_engine() -> None:
    call, client, control = Call("r"), Client(), Control()
    running = asyncio.ensure_future(answer(job(call), client, control))
    for tokens in ([104], [105, 106], [107]):
        call.push(tokens)
        await asyncio.sleep(0.01)
    call.ended(End(record()))
    await running
    assert texts(client.bodies) == ["h", "ij", "k"]
    assert len(client.bodies) == 4
    assert control.cancelled == []


async def test_failure_before_the_first_token_is_a_whole_response() -> None:
    call, client = Call("r"), Client()
    call.ended(End(record(Outcome.FAILED), unavailable("no node", "no_node", 2.5)))
    await answer(job(call), client, Control())
    headers = dict(client.sent[0]["headers"])
    assert (client.sent[0]["status"], headers[b"retry-after"], headers[b"x-request-id"]) == (503, b"3", b"mine")
    assert json.loads(client.bodies[0])["error"]["code"] == "no_node"


async def test_failure_after_the_first_token_is_the_last_event() -> None:
    call, client = Call("r"), Client()
    running = asyncio.ensure_future(answer(job(call), client, Control()))
    call.push([104])
    await asyncio.sleep(0.01)
    call.ended(End(record(Outcome.FAILED), unavailable("lost", "attempts_exhausted")))
    await running
    assert client.sent[0]["status"] == 200
    assert json.loads(client.bodies[-1].removeprefix(b"data: "))["error"]["code"] == "attempts_exhausted"
    assert client.sent[-1]["more_body"] is False


async def test_headers_tell_the_placement() -> None:
    call, client = Call("r"), Client()
    call.placed = Placed("r", "p1", "d1", 36, "zweig-é", 3, ())
    call.push([104])
    call.ended(End(record()))
    await answer(job(call), client, Control())
    headers = dict(client.sent[0]["headers"])
    assert (headers[b"x-ei-prefill-node"], headers[b"x-ei-decode-node"]) == (b"p1", b"d1")
    assert (headers[b"x-ei-cached-tokens"], headers[b"x-ei-branch-version"]) == (b"36", b"3")
    assert b"x-ei-branch-id" not in headers


@pytest.mark.parametrize("stream", [True, False])
async def test_usage_is_what_happened(stream: bool) -> None:
    call, client = Call("r"), Client()
    call.push([104, 105])
    call.ended(End(record()))
    await answer(job(call, stream=stream, chat=True), client, Control())
    text = b"".join(client.bodies).decode()
    assert '"prompt_tokens_details":{"cached_tokens":36}' in text
    assert '"total_tokens":42' in text


def test_backlog_counts_what_was_not_taken() -> None:
    call = Call("r")
    for _ in range(10):
        call.push([1, 2])
    assert call.backlog_bytes == 10 * (200 + 16)
    assert call.take() == [1, 2] * 10
    assert call.backlog_bytes == 0
