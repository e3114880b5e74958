"""The router's side of its parser process: started with the first request that needs it, asked over a pipe."""

import asyncio
import contextlib
import importlib.util
import itertools
import os
import struct
import sys
from typing import Any

import msgspec

from services.router.text.pieces import CallBegun, CallPart, Piece, Text, Thought

COMMAND = (sys.executable, "-m", "services.router.text.parser_worker")
_LENGTH = struct.Struct("<I")


class ParserFailed(RuntimeError):
    """The parser process refused, or is gone; the text says why."""


class Formats(msgspec.Struct, frozen=True):
    """SGLang's names of the parsers a model's answers need, "" for none.

    `thinking`: every answer begins inside a thought that the template has opened.
    """

    tool_parser: str = ""
    reasoning_parser: str = ""
    thinking: bool = False


def installed() -> bool:
    """Whether SGLang, whose parsers these are, is installed here (extra `engine`)."""
    return importlib.util.find_spec("sglang") is not None


class Parsers:
    """One process for all answers. It is started again when it has died; answers under way in it fail."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count(1)
        self._starting = asyncio.Lock()

    @property
    def running(self) -> bool:
        """Whether the process is there."""
        return self._process is not None and self._process.returncode is None

    async def detect(self, template: str, special: list[str]) -> Formats:
        """The formats that belong to a chat template."""
        found = await self.ask("detect", "", {"template": template, "special": special})
        return msgspec.convert(found, Formats)

    async def open(self, key: str, formats: Formats, tools: list[dict[str, Any]]) -> "Parsing":
        """Parsers for one answer, known as `key`."""
        payload = msgspec.structs.asdict(formats) | {"tools": tools}
        await self.ask("open", key, payload)
        return Parsing(self, key)

    async def ask(self, verb: str, key: str, payload: Any) -> Any:
        """One question. ParserFailed."""
        process = await self._running()
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._send(process, [number, verb, key, payload])
        try:
            return await answer
        finally:
            self._waiting.pop(number, None)

    def tell(self, verb: str, key: str) -> None:
        """Without waiting for an answer."""
        if self._process is not None and self._process.returncode is None:
            self._send(self._process, [next(self._numbers), verb, key, None])

    async def stop(self) -> None:
        """End the process."""
        process = self._process
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        if self._reading is not None:
            await asyncio.wait([self._reading])

    @staticmethod
    def _send(process: asyncio.subprocess.Process, request: list[Any]) -> None:
        assert process.stdin is not None
        data = msgspec.msgpack.encode(request)
        process.stdin.write(_LENGTH.pack(len(data)) + data)

    async def _running(self) -> asyncio.subprocess.Process:
        async with self._starting:
            if self._process is None or self._process.returncode is not None:
                pipe = asyncio.subprocess.PIPE
                self._process = await asyncio.create_subprocess_exec(
                    *COMMAND, stdin=pipe, stdout=pipe, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}
                )
                self._reading = asyncio.create_task(self._read(self._process), name="parser answers")
            return self._process

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                (length,) = _LENGTH.unpack(await process.stdout.readexactly(_LENGTH.size))
                number, error, result = msgspec.msgpack.decode(await process.stdout.readexactly(length))
                answer = self._waiting.get(number)
                if answer is None or answer.done():
                    continue
                if error is None:
                    answer.set_result(result)
                else:
                    answer.set_exception(ParserFailed(error))
        code = await process.wait()
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(ParserFailed(f"the parser process ended with code {code}"))


class Parsing:
    """The parsers of one answer; `close` when it is over."""

    def __init__(self, parsers: Parsers, key: str) -> None:
        self._parsers, self._key = parsers, key

    async def push(self, text: str) -> list[Piece]:
        """What more text makes certain."""
        return [_piece(raw) for raw in await self._parsers.ask("push", self._key, text)] if text else []

    async def end(self) -> list[Piece]:
        """What was held back, when no more text comes."""
        return [_piece(raw) for raw in await self._parsers.ask("end", self._key, "")]

    async def whole(self, text: str) -> list[Piece]:
        """All pieces of a complete answer."""
        return [_piece(raw) for raw in await self._parsers.ask("whole", self._key, text)]

    def close(self) -> None:
        self._parsers.tell("close", self._key)


def _piece(raw: list[Any]) -> Piece:
    kind = raw[0]
    if kind == "text":
        return Text(raw[1])
    if kind == "thought":
        return Thought(raw[1])
    return CallBegun(raw[1], raw[2]) if kind == "call" else CallPart(raw[1], raw[2])
