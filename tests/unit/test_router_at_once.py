"""Words of a stream written where they come in: nothing lost, in order, and the handler for all that must wait."""

import asyncio
import json
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from services.http_direct import direct_extension
from services.router.api.answer import AnswerResponse, Job
from services.router.api.openai_response import CompletionShape, Head
from services.router.api.reader import PlainReader
from services.router.api.vigil import Patience
from services.router.calls import Call
from services.router.core.effects import End, Outcome
from services.router.text.byte_tokenizer import byte_tokenizer
from services.router.text.stream import TextStream
from tests.unit.test_router_answer import Control, record

LIBRARY = byte_tokenizer()


class Response:
    """What uvicorn has of one response, with a buffer that can be full."""

    def __init__(self, wire: "Wire") -> None:
        self.chunked_encoding, self.disconnected = True, False
        self.flow = SimpleNamespace(write_paused=False)
        self.transport = SimpleNamespace(write=wire.direct)


@dataclass
class Wire:
    """Everything a client gets, in order; `send` waits while the buffer is full."""

    got: list[bytes] = field(default_factory=list)
    room: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.response = Response(self)
        self.resume()

    def pause(self) -> None:
        self.response.flow.write_paused = True
        self.room.clear()

    def resume(self) -> None:
        self.response.flow.write_paused = False
        self.room.set()

    def direct(self, part: bytes) -> None:
        assert not self.response.flow.write_paused
        size, body = part.split(b"\r\n", 1)
        assert int(size, 16) == len(body) - 2
        self.got.append(body[:-2])

    async def send(self, message: Any) -> None:
        await self.room.wait()
        if message["type"] == "http.response.body" and not self.response.disconnected:
            self.got.append(message["body"])

    async def receive(self) -> Any:
        await asyncio.Event().wait()

    @property
    def text(self) -> str:
        lines = b"".join(self.got).decode().splitlines()
        parts = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        return "".join(choice["text"] for part in parts for choice in part["choices"])


def begun(call: Call, wire: Wire, control: Control, *stops: str, keep_alive_s: float = 5.0) -> "asyncio.Task[None]":
    reader = PlainReader(TextStream(LIBRARY, stops), frozenset())
    job = Job(call, CompletionShape(Head("c", 1, "m")), reader, stream=True, request_id="mine")
    response = AnswerResponse(job, control, Patience(keep_alive_s, 5.0))
    scope = {"extensions": direct_extension(wire.response)}  # type: ignore[arg-type]  # as much of it as is used
    return asyncio.ensure_future(response(scope, wire.receive, wire.send))


async def turns(count: int = 4) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_words_of_a_stream_under_way_take_no_turn_of_the_loop() -> None:
    call, wire = Call("r"), Wire()
    running = begun(call, wire, Control())
    call.push([104])
    await turns()
    assert wire.text == "h"
    call.push([105])
    call.push([106, 107])
    assert (wire.text, call.backlog_bytes) == ("hijk", 0)
    call.ended(End(record()))
    await running
    assert wire.got[-1].endswith(b"data: [DONE]\n\n")


async def test_a_full_buffer_leaves_the_words_to_the_handler_and_counts_them() -> None:
    call, wire = Call("r"), Wire()
    running = begun(call, wire, Control())
    call.push([104])
    await turns()
    wire.pause()
    call.push([105])
    await turns()
    call.push([106])
    call.push([107])
    assert (wire.text, call.backlog_bytes) == ("h", 2 * 208)
    wire.resume()
    call.push([108])
    assert wire.text == "h"
    await turns()
    assert wire.text == "hijkl"
    call.ended(End(record()))
    await running


async def test_a_stop_string_found_at_once_ends_the_answer() -> None:
    call, wire, control = Call("r"), Wire(), Control()
    running = begun(call, wire, control, "jk")
    call.push([104])
    await turns()
    call.push([105, 106])
    call.push([107, 108])
    assert (wire.text, call.end is not None) == ("hi", True)
    await running
    assert control.cancelled == []
    assert b'"finish_reason":"stop"' in wire.got[-1]


async def test_what_fails_at_once_fails_its_own_call() -> None:
    call, wire, control = Call("r"), Wire(), Control()
    running = begun(call, wire, control)
    call.push([104])
    await turns()
    call.push(["no token"])  # type: ignore[list-item]  # that is the point
    (failed,) = await asyncio.gather(running, return_exceptions=True)
    assert isinstance(failed, ExceptionGroup)
    assert control.cancelled == ["gone"]


async def test_a_client_that_has_gone_is_not_written_to() -> None:
    call, wire = Call("r"), Wire()
    running = begun(call, wire, Control())
    call.push([104])
    await turns()
    wire.response.disconnected = True
    call.push([105])
    assert wire.text == "h"
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    call.push([106])
    assert wire.text == "h"


async def test_words_written_at_once_count_as_signs_of_life() -> None:
    call, wire = Call("r"), Wire()
    running = begun(call, wire, Control(), keep_alive_s=0.05)
    call.push([104])
    for _ in range(15):
        await asyncio.sleep(0.01)
        call.push([105])
    assert not any(part.startswith(b":") for part in wire.got)
    call.ended(End(record()))
    await running


STEPS = st.lists(
    st.one_of(
        st.lists(st.integers(97, 122), min_size=1, max_size=3), st.sampled_from(["pause", "resume", "turn", "nudge"])
    ),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(STEPS)
def test_every_word_comes_once_and_in_order(steps: list[Any]) -> None:
    async def play() -> None:
        call, wire = Call("r"), Wire()
        running = begun(call, wire, Control())
        said = list[int]()
        for step in steps:
            if isinstance(step, list):
                said += step
                call.push(step)
            elif step == "pause":
                wire.pause()
            elif step == "resume":
                wire.resume()
            elif step == "nudge":
                call.nudge()
            else:
                await turns(1)
        wire.resume()
        call.ended(End(record(Outcome.LENGTH)))
        await running
        assert wire.text == bytes(said).decode()
        assert wire.got[-1].endswith(b"data: [DONE]\n\n")

    asyncio.run(play())
