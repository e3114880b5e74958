"""One agent with real text beside the recorded ones: a conversation whose answers people can read."""

import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

QUESTIONS = (
    "What is the capital of France?",
    "And of Italy?",
    "Name three animals that live in the sea.",
    "Which of them is the largest?",
    "Write one sentence about it.",
)
SYSTEM = "You are a helpful assistant. Answer in one short sentence."
ANSWER_TOKENS = 32


@dataclass(slots=True)
class Turn:
    """One question and its answer; `prompt` and `answer` are token ids, `error` is "" for a whole answer."""

    question: str
    text: str = ""
    prompt: list[int] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    ttft_s: float | None = None
    took_s: float = 0.0
    nodes: str = ""
    error: str = ""


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Details | None = None


class _Error(msgspec.Struct):
    message: str = ""


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


class _Tokenized(msgspec.Struct):
    tokens: list[int]


_CHUNK = msgspec.json.Decoder(_Chunk)


class Talk:
    """A conversation as branch `branch`: each turn's prompt contains all turns before it."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str, branch: str) -> None:
        self._session, self._url, self._model, self._branch = session, url, model, branch
        self._messages: list[dict[str, str]] = [{"role": "system", "content": SYSTEM}]

    async def ask(self, question: str, *, last: bool) -> Turn:
        """One turn, the branch's last or not. What goes wrong stands in `Turn.error`."""
        turn = Turn(question)
        self._messages.append({"role": "user", "content": question})
        try:
            turn.prompt = await self._tokens()
            await self._stream(turn, last=last)
        except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError) as error:
            turn.error = f"{type(error).__name__}: {error}"
        self._messages.append({"role": "assistant", "content": turn.text})
        return turn

    async def _tokens(self) -> list[int]:
        """The prompt as the router renders it."""
        answer = await self._post("/tokenize", {"model": self._model, "messages": self._messages}, {})
        async with answer:
            answer.raise_for_status()
            return msgspec.json.decode(await answer.read(), type=_Tokenized).tokens

    async def _stream(self, turn: Turn, *, last: bool) -> None:
        body = {
            "model": self._model,
            "messages": self._messages,
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        headers = {"x-ei-branch-id": self._branch} | ({"x-ei-branch-end": "true"} if last else {})
        begun = time.monotonic()
        async with await self._post("/v1/chat/completions", body, headers) as answer:
            if answer.status != 200:
                turn.error = f"HTTP {answer.status}: {(await answer.text())[:300]}"
                return
            turn.nodes = f"{answer.headers.get('x-ei-prefill-node')} > {answer.headers.get('x-ei-decode-node')}"
            async for line in answer.content:
                data = line.removeprefix(b"data:").strip()
                if not line.startswith(b"data:") or data == b"[DONE]":
                    continue
                self._take(turn, _CHUNK.decode(data), begun)
        turn.took_s = time.monotonic() - begun
        if not turn.answer and not turn.error:
            turn.error = "the stream ended without a token"

    def _take(self, turn: Turn, chunk: _Chunk, begun: float) -> None:
        if chunk.error is not None:
            turn.error = chunk.error.message
        if chunk.usage is not None and chunk.usage.prompt_tokens_details is not None:
            turn.cached_tokens = chunk.usage.prompt_tokens_details.cached_tokens
        for choice in chunk.choices:
            turn.answer += choice.token_ids or []
            if choice.token_ids and turn.ttft_s is None:
                turn.ttft_s = time.monotonic() - begun
            if choice.delta is not None:
                turn.text += choice.delta.content or ""

    async def _post(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> aiohttp.ClientResponse:
        sent = {"content-type": "application/json", **headers}
        return await self._session.post(self._url + path, data=msgspec.json.encode(body), headers=sent)
