"""OpenAI answers: whole, and as the chunks of a stream."""

from typing import Any, Protocol

import msgspec

from services.router.core.effects import Outcome, Record

DONE = b"data: [DONE]\n\n"
_JSON = msgspec.json.Encoder()


class Head(msgspec.Struct, frozen=True):
    """What every part of one answer repeats."""

    id: str
    created: int
    model: str


def usage_of(record: Record) -> dict[str, Any]:
    """Tokens as they were counted: cached ones always named."""
    return {
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.output_tokens,
        "total_tokens": record.prompt_tokens + record.output_tokens,
        "prompt_tokens_details": {"cached_tokens": record.cached_tokens},
    }


def finish_reason(record: Record) -> str:
    return "length" if record.outcome is Outcome.LENGTH else "stop"


def event(content: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + _JSON.encode(content) + b"\n\n"


class Shape(Protocol):
    """How one dialect puts text into words."""

    def opening(self) -> bytes:
        """What a stream begins with."""
        ...

    def delta(self, text: str, token_ids: list[int] | None) -> bytes: ...

    def closing(self, reason: str) -> bytes:
        """The chunk that says why the answer ended."""
        ...

    def usage(self, record: Record) -> bytes: ...

    def whole(self, text: str, record: Record, token_ids: list[int] | None) -> dict[str, Any]: ...


class ChatShape:
    """`chat.completion` and its chunks."""

    def __init__(self, head: Head) -> None:
        self._head = head

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        head = self._head
        return event(
            {
                "id": head.id,
                "object": "chat.completion.chunk",
                "created": head.created,
                "model": head.model,
                "choices": choices,
                **more,
            }
        )

    def opening(self) -> bytes:
        return self._choice({"role": "assistant", "content": ""}, None)

    def delta(self, text: str, token_ids: list[int] | None) -> bytes:
        return self._choice({"content": text}, None, token_ids)

    def closing(self, reason: str) -> bytes:
        return self._choice({}, reason)

    def usage(self, record: Record) -> bytes:
        return self._chunk([], usage=usage_of(record))

    def whole(self, text: str, record: Record, token_ids: list[int] | None) -> dict[str, Any]:
        head = self._head
        choice: dict[str, Any] = {
            "index": 0,
            "message": {"role": "assistant", "content": text},
            "finish_reason": finish_reason(record),
            "logprobs": None,
        }
        if token_ids is not None:
            choice["token_ids"] = token_ids
        return {
            "id": head.id,
            "object": "chat.completion",
            "created": head.created,
            "model": head.model,
            "choices": [choice],
            "usage": usage_of(record),
        }

    def _choice(self, delta: dict[str, Any], reason: str | None, token_ids: list[int] | None = None) -> bytes:
        choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": reason}
        if token_ids is not None:
            choice["token_ids"] = token_ids
        return self._chunk([choice])


class CompletionShape:
    """`text_completion`, whose chunks look like the whole."""

    def __init__(self, head: Head) -> None:
        self._head = head

    def _body(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        head = self._head
        return {
            "id": head.id,
            "object": "text_completion",
            "created": head.created,
            "model": head.model,
            "choices": choices,
            **more,
        }

    def opening(self) -> bytes:
        return b""

    def delta(self, text: str, token_ids: list[int] | None) -> bytes:
        return event(self._body([self._choice(text, None, token_ids)]))

    def closing(self, reason: str) -> bytes:
        return event(self._body([self._choice("", reason, None)]))

    def usage(self, record: Record) -> bytes:
        return event(self._body([], usage=usage_of(record)))

    def whole(self, text: str, record: Record, token_ids: list[int] | None) -> dict[str, Any]:
        return self._body([self._choice(text, finish_reason(record), token_ids)], usage=usage_of(record))

    def _choice(self, text: str, reason: str | None, token_ids: list[int] | None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": reason, "logprobs": None}
        if token_ids is not None:
            choice["token_ids"] = token_ids
        return choice
