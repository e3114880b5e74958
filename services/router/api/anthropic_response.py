"""Anthropic answers: one message, whole or block by block."""

import secrets
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.responses import Response

from services.router.api.errors import anthropic_error, error_response
from services.router.api.shape import Ending, Head, TextFrame, event
from services.router.core.effects import Placed, Record
from services.router.core.failure import Failure
from services.router.text.pieces import CallBegun, CallPart, Gathered, Piece, Text, Thought

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def usage_of(prompt_tokens: int, cached_tokens: int, output_tokens: int) -> dict[str, int]:
    """`input_tokens` are those that were not cached."""
    return {
        "input_tokens": prompt_tokens - cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
        "output_tokens": output_tokens,
    }


class MessageShape:
    """`message`, and the named events that build one. A block is open until a piece of another kind comes."""

    def __init__(self, head: Head, prompt_tokens: int) -> None:
        self._head, self._prompt_tokens = head, prompt_tokens
        self._blocks = 0
        self._open: tuple[str, int] | None = None
        self._words: TextFrame | None = None

    def opening(self, placed: Placed | None) -> bytes:
        cached = min(placed.cached_tokens, self._prompt_tokens) if placed is not None else 0
        message = self._message([], None, None, usage_of(self._prompt_tokens, cached, 0))
        return _event("message_start", message=message) + _event("ping")

    def delta(self, pieces: Sequence[Piece], token_ids: list[int] | None) -> bytes:
        """Events of a stream; more words of an open block, the most frequent kind, have a frame that is made once."""
        if self._words is not None and len(pieces) == 1 and isinstance(pieces[0], Text):
            return self._words.around(pieces[0].text)
        return b"".join(self._piece(piece) for piece in pieces)

    def closing(self, ending: Ending) -> bytes:
        reason, stop = _reason(ending)
        usage = _counted(ending.record)
        delta = {"stop_reason": reason, "stop_sequence": stop}
        return self._close() + _event("message_delta", delta=delta, usage=usage) + _event("message_stop")

    def whole(self, answer: Gathered, ending: Ending, token_ids: list[int] | None) -> dict[str, Any]:
        content: list[dict[str, Any]] = []
        if answer.thought:
            content.append({"type": "thinking", "thinking": answer.thought, "signature": ""})
        if answer.text or not answer.calls:
            content.append({"type": "text", "text": answer.text})
        content += [
            {"type": "tool_use", "id": _call_id(), "name": call.name, "input": _input(call.arguments)}
            for call in answer.calls
        ]
        return self._message(content, *_reason(ending), _counted(ending.record))

    def broken(self, failure: Failure) -> bytes:
        return event(anthropic_error(failure), "error")

    def keep_alive(self) -> bytes:
        return _event("ping")

    def refusal(self, failure: Failure, request_id: str) -> Response:
        return error_response(failure, request_id, anthropic_error)

    def _message(
        self, content: list[dict[str, Any]], reason: str | None, stop: str | None, usage: dict[str, int]
    ) -> dict[str, Any]:
        return {
            "id": self._head.id,
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": usage,
        }

    def _piece(self, piece: Piece) -> bytes:
        if isinstance(piece, Text):
            return self._in_block("text", 0, {"type": "text", "text": ""}, {"type": "text_delta", "text": piece.text})
        if isinstance(piece, Thought):
            block = {"type": "thinking", "thinking": "", "signature": ""}
            return self._in_block("thinking", 0, block, {"type": "thinking_delta", "thinking": piece.text})
        if isinstance(piece, CallBegun):
            call: dict[str, Any] = {"type": "tool_use", "id": _call_id(), "name": piece.name, "input": {}}
            return self._in_block("tool_use", piece.index, call, None)
        return self._part(piece)

    def _part(self, piece: CallPart) -> bytes:
        if self._open != ("tool_use", piece.index):
            return b""
        return self._delta({"type": "input_json_delta", "partial_json": piece.arguments})

    def _in_block(self, kind: str, number: int, block: dict[str, Any], delta: dict[str, Any] | None) -> bytes:
        data = b""
        if self._open != (kind, number):
            data = self._close() + _event("content_block_start", index=self._blocks, content_block=block)
            self._open = (kind, number)
            if kind == "text":
                self._words = TextFrame(self._delta({"type": "text_delta", "text": "\0"}))
        return data if delta is None else data + self._delta(delta)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._blocks, delta=delta)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        self._open = self._words = None
        self._blocks += 1
        return _event("content_block_stop", index=self._blocks - 1)


def _event(kind: str, **more: Any) -> bytes:
    return event({"type": kind, **more}, kind)


def _counted(record: Record) -> dict[str, int]:
    return usage_of(record.prompt_tokens, record.cached_tokens, record.output_tokens)


def _reason(ending: Ending) -> tuple[str, str | None]:
    return ("stop_sequence", ending.stop) if ending.stop is not None else (_REASONS[ending.reason], None)


def _input(arguments: str) -> Any:
    """The arguments as an object; what the model left unfinished is kept as text."""
    try:
        found = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        return {"_unfinished": arguments}
    return found if isinstance(found, dict) else {"_unfinished": arguments}


def _call_id() -> str:
    return f"toolu_{secrets.token_hex(12)}"
