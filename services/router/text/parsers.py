"""The router's side of its parser process: what an answer needs of SGLang's parsers."""

import importlib.util
from typing import Any

import msgspec

from services.router.text.pieces import CallBegun, CallPart, Piece, Text, Thought
from services.router.text.worker_process import WorkerProcess


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


class Parsers(WorkerProcess):
    """SGLang's parsers, one process for all answers."""

    module = "services.router.text.parser_worker"

    async def detect(self, template: str, special: list[str]) -> Formats:
        """The formats that belong to a chat template."""
        found = await self.ask("detect", "", {"template": template, "special": special})
        return msgspec.convert(found, Formats)

    async def open(self, key: str, formats: Formats, tools: list[dict[str, Any]]) -> "Parsing":
        """Parsers for one answer, known as `key`."""
        payload = msgspec.structs.asdict(formats) | {"tools": tools}
        await self.ask("open", key, payload)
        return Parsing(self, key)


class Parsing:
    """The parsers of one answer; `close` when it is over."""

    def __init__(self, parsers: Parsers, key: str) -> None:
        self._parsers, self._key = parsers, key

    async def push(self, text: str) -> list[Piece]:
        """What more text makes certain."""
        return [_piece(raw) for raw in await self._parsers.ask("push", self._key, text)] if text else []

    async def end(self, *, cut: bool) -> list[Piece]:
        """What was held back, when no more text comes. `cut`: the model would have gone on."""
        return [_piece(raw) for raw in await self._parsers.ask("end", self._key, cut)]

    async def whole(self, text: str, *, cut: bool) -> list[Piece]:
        """All pieces of an answer; of a call that was `cut`, what there is."""
        return [_piece(raw) for raw in await self._parsers.ask("cut" if cut else "whole", self._key, text)]

    def close(self) -> None:
        self._parsers.tell("close", self._key)


def _piece(raw: list[Any]) -> Piece:
    kind = raw[0]
    if kind == "text":
        return Text(raw[1])
    if kind == "thought":
        return Thought(raw[1])
    return CallBegun(raw[1], raw[2]) if kind == "call" else CallPart(raw[1], raw[2])
