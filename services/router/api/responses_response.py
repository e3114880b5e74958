"""Responses answers: one response object, whole or item by item."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.responses import Response

from services.router.api.errors import error_response
from services.router.api.responses_request import CUSTOM, Member
from services.router.api.shape import KEEP_ALIVE, Ending, Head, event
from services.router.core.effects import Placed, Record
from services.router.core.failure import Failure
from services.router.text.pieces import CallBegun, CallPart, Gathered, Piece, Text, Thought

Item = dict[str, Any]


def usage_of(record: Record) -> dict[str, Any]:
    """Tokens as they were counted."""
    return {
        "input_tokens": record.prompt_tokens,
        "input_tokens_details": {"cached_tokens": record.cached_tokens},
        "output_tokens": record.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": record.prompt_tokens + record.output_tokens,
    }


@dataclass(slots=True)
class _Open:
    """The item that is being said: its place in the output, and what has been said of it."""

    item: Item
    index: int
    parts: list[str] = field(default_factory=list)
    number: int | None = None

    @property
    def text(self) -> str:
        return "".join(self.parts)


class ResponseShape:
    """`response`, and the events that build one. `kinds`: namespaces and custom tools by function name.

    `echo`: fields of the request that the response repeats.
    """

    def __init__(self, head: Head, kinds: Mapping[str, Any], echo: Mapping[str, Any]) -> None:
        self._head, self._kinds, self._echo = head, kinds, echo
        self._numbers = 0
        self._output: list[Item] = []
        self._open: _Open | None = None

    def opening(self, placed: Placed | None) -> bytes:
        begun = self._response("in_progress", [], None)
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def delta(self, pieces: Sequence[Piece], token_ids: list[int] | None) -> bytes:
        return b"".join(self._piece(piece) for piece in pieces)

    def closing(self, ending: Ending) -> bytes:
        status = _status(ending)
        data = self._close(status)
        body = self._response(status, self._output, usage_of(ending.record))
        return data + self._event(f"response.{status}", response=body)

    def whole(self, answer: Gathered, ending: Ending, token_ids: list[int] | None) -> dict[str, Any]:
        pieces: list[Piece] = [Thought(answer.thought)] if answer.thought else []
        pieces += [Text(answer.text)] if answer.text or not answer.calls else []
        for index, call in enumerate(answer.calls):
            pieces += [CallBegun(index, call.name), CallPart(index, call.arguments)]
        self.delta(pieces, None)
        status = _status(ending)
        self._close(status)
        return self._response(status, self._output, usage_of(ending.record))

    def broken(self, failure: Failure) -> bytes:
        error = {"code": failure.code or failure.kind, "message": failure.message}
        body = self._response("failed", self._output, None) | {"error": error}
        return self._event("response.failed", response=body)

    def keep_alive(self) -> bytes:
        return KEEP_ALIVE

    def refusal(self, failure: Failure, request_id: str) -> Response:
        return error_response(failure, request_id)

    def _response(self, status: str, output: list[Item], usage: dict[str, Any] | None) -> dict[str, Any]:
        head = self._head
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": head.id,
            "object": "response",
            "created_at": head.created,
            "model": head.model,
            "status": status,
            "error": None,
            "incomplete_details": reason,
            "output": list(output),
            "usage": usage,
            "store": False,
            "previous_response_id": None,
            **self._echo,
        }

    def _event(self, kind: str, **more: Any) -> bytes:
        self._numbers += 1
        return event({"type": kind, "sequence_number": self._numbers - 1, **more}, kind)

    # -- items ----------------------------------------------------------------------------------------------------

    def _piece(self, piece: Piece) -> bytes:
        if isinstance(piece, Text):
            return self._said("message", piece.text, "response.output_text.delta", content_index=0, logprobs=[])
        if isinstance(piece, Thought):
            return self._said("reasoning", piece.text, "response.reasoning_text.delta", content_index=0)
        if isinstance(piece, CallBegun):
            return self._begin(self._call(piece.name), piece.index)
        if self._open is None or self._open.number != piece.index:
            return b""
        self._open.parts.append(piece.arguments)
        if self._open.item["type"] != "function_call":
            return b""
        return self._event("response.function_call_arguments.delta", **self._where(), delta=piece.arguments)

    def _said(self, kind: str, text: str, event_kind: str, **more: Any) -> bytes:
        data = b""
        if self._open is None or self._open.item["type"] != kind:
            data = self._begin(_message() if kind == "message" else _reasoning(), None)
        assert self._open is not None
        self._open.parts.append(text)
        return data + self._event(event_kind, **self._where(), **more, delta=text)

    def _begin(self, item: Item, number: int | None) -> bytes:
        data = self._close()
        self._open = _Open(item, len(self._output), number=number)
        data += self._event("response.output_item.added", output_index=self._open.index, item=item)
        if item["type"] == "message":
            data += self._event("response.content_part.added", **self._where(), content_index=0, part=_part(""))
        return data

    def _close(self, status: str = "completed") -> bytes:
        """The open item is complete, or cut with the response."""
        if self._open is None:
            return b""
        text, item, where, data = self._open.text, self._open.item, self._where(), b""
        done: Item = item | ({"status": status} if item["type"] != "reasoning" else {})
        if item["type"] == "message":
            done["content"] = [_part(text)]
            data += self._event("response.output_text.done", **where, content_index=0, text=text, logprobs=[])
            data += self._event("response.content_part.done", **where, content_index=0, part=_part(text))
        elif item["type"] == "reasoning":
            done["content"] = [{"type": "reasoning_text", "text": text}]
            data += self._event("response.reasoning_text.done", **where, content_index=0, text=text)
        elif item["type"] == "function_call":
            done["arguments"] = text
            named = {"name": item["name"], "arguments": text}
            data += self._event("response.function_call_arguments.done", **where, **named)
        else:
            done["input"] = _input(text)
            data += self._event("response.custom_tool_call_input.done", **where, input=done["input"])
        data += self._event("response.output_item.done", output_index=self._open.index, item=done)
        self._output.append(done)
        self._open = None
        return data

    def _where(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open.item["id"], "output_index": self._open.index}

    def _call(self, name: str) -> Item:
        kind = self._kinds.get(name)
        item: Item = {"id": f"fc_{secrets.token_hex(12)}", "call_id": f"call_{secrets.token_hex(12)}", "name": name}
        if kind == CUSTOM:
            return item | {"type": "custom_tool_call", "input": "", "status": "in_progress"}
        item |= {"type": "function_call", "arguments": "", "status": "in_progress"}
        return item | {"namespace": kind.namespace, "name": kind.name} if isinstance(kind, Member) else item


def _message() -> Item:
    identity = f"msg_{secrets.token_hex(12)}"
    return {"id": identity, "type": "message", "role": "assistant", "status": "in_progress", "content": []}


def _reasoning() -> Item:
    return {"id": f"rs_{secrets.token_hex(12)}", "type": "reasoning", "summary": [], "content": []}


def _part(text: str) -> Item:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _status(ending: Ending) -> str:
    return "incomplete" if ending.reason == "length" else "completed"


def _input(arguments: str) -> str:
    """The one text a custom tool takes."""
    try:
        found = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        return arguments
    text = found.get("input") if isinstance(found, dict) else None
    return text if isinstance(text, str) else arguments
