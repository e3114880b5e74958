"""OpenAI answers: whole, and as the chunks of a stream."""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from starlette.responses import Response

from services.router.api.errors import error_response, openai_error
from services.router.api.shape import KEEP_ALIVE, Ending, Head, TextFrame, event
from services.router.core.effects import Placed, Record
from services.router.core.failure import Failure
from services.router.text.pieces import CallBegun, Gathered, Piece, Text, Thought

DONE = b"data: [DONE]\n\n"


def usage_of(record: Record) -> dict[str, Any]:
    """Tokens as they were counted: cached ones always named."""
    return {
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.output_tokens,
        "total_tokens": record.prompt_tokens + record.output_tokens,
        "prompt_tokens_details": {"cached_tokens": record.cached_tokens},
    }


def call_id() -> str:
    """A new id of a tool call."""
    return f"call_{secrets.token_hex(12)}"


class _OpenAIShape(ABC):
    """What both dialects share: the head of every part, errors and signs of life."""

    kind = ""
    chunk_kind = ""

    def __init__(self, head: Head, *, include_usage: bool = False) -> None:
        self._head, self._include_usage = head, include_usage
        self._text = TextFrame(self._delta([Text("\0")], None))

    def delta(self, pieces: Sequence[Piece], token_ids: list[int] | None) -> bytes:
        """Chunks of a stream; plain words, its most frequent kind, go through a frame that is made once."""
        if token_ids is None and len(pieces) == 1 and isinstance(pieces[0], Text):
            return self._text.around(pieces[0].text)
        return self._delta(pieces, token_ids)

    @abstractmethod
    def _delta(self, pieces: Sequence[Piece], token_ids: list[int] | None) -> bytes:
        """Chunks of any pieces."""

    def _part(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        head = self._head
        return {
            "id": head.id,
            "object": kind,
            "created": head.created,
            "model": head.model,
            "choices": choices,
            **more,
        }

    def _ended(self, choice: dict[str, Any], ending: Ending) -> bytes:
        data = event(self._part(self.chunk_kind, [choice | {"finish_reason": ending.reason}]))
        if self._include_usage:
            data += event(self._part(self.chunk_kind, [], usage=usage_of(ending.record)))
        return data + DONE

    def broken(self, failure: Failure) -> bytes:
        return event(openai_error(failure))

    def keep_alive(self) -> bytes:
        return KEEP_ALIVE

    def refusal(self, failure: Failure, request_id: str) -> Response:
        return error_response(failure, request_id)


class ChatShape(_OpenAIShape):
    """`chat.completion` and its chunks."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def opening(self, placed: Placed | None) -> bytes:
        return self._chunk({"role": "assistant", "content": ""}, None)

    def _delta(self, pieces: Sequence[Piece], token_ids: list[int] | None) -> bytes:
        if not pieces:
            return self._chunk({"content": ""}, token_ids)
        first, *rest = pieces
        return self._chunk(_delta(first), token_ids) + b"".join(self._chunk(_delta(piece), None) for piece in rest)

    def closing(self, ending: Ending) -> bytes:
        return self._ended({"index": 0, "delta": {}}, ending)

    def whole(self, answer: Gathered, ending: Ending, token_ids: list[int] | None) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": answer.text}
        if answer.thought:
            message["reasoning_content"] = answer.thought
        if answer.calls:
            message["content"] = answer.text or None
            message["tool_calls"] = [
                {"id": call_id(), "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in answer.calls
            ]
        choice: dict[str, Any] = {
            "index": 0,
            "message": message,
            "finish_reason": ending.reason,
            "logprobs": None,
        }
        if token_ids is not None:
            choice["token_ids"] = token_ids
        return self._part(self.kind, [choice], usage=usage_of(ending.record))

    def _chunk(self, delta: dict[str, Any], token_ids: list[int] | None) -> bytes:
        choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": None}
        if token_ids is not None:
            choice["token_ids"] = token_ids
        return event(self._part(self.chunk_kind, [choice]))


class CompletionShape(_OpenAIShape):
    """`text_completion`, whose chunks look like the whole."""

    kind = chunk_kind = "text_completion"

    def opening(self, placed: Placed | None) -> bytes:
        return b""

    def _delta(self, pieces: Sequence[Piece], token_ids: list[int] | None) -> bytes:
        return event(self._part(self.kind, [_choice(Gathered.of(pieces).text, None, token_ids)]))

    def closing(self, ending: Ending) -> bytes:
        return self._ended(_choice("", None, None), ending)

    def whole(self, answer: Gathered, ending: Ending, token_ids: list[int] | None) -> dict[str, Any]:
        choice = _choice(answer.text, ending.reason, token_ids)
        return self._part(self.kind, [choice], usage=usage_of(ending.record))


def _choice(text: str, reason: str | None, token_ids: list[int] | None) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": reason, "logprobs": None}
    if token_ids is not None:
        choice["token_ids"] = token_ids
    return choice


def _delta(piece: Piece) -> dict[str, Any]:
    if isinstance(piece, Text):
        return {"content": piece.text}
    if isinstance(piece, Thought):
        return {"reasoning_content": piece.text}
    call: dict[str, Any] = {"index": piece.index}
    if isinstance(piece, CallBegun):
        call |= {"id": call_id(), "type": "function", "function": {"name": piece.name, "arguments": ""}}
    else:
        call["function"] = {"arguments": piece.arguments}
    return {"tool_calls": [call]}
