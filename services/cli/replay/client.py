"""One request as an agent sends it: token ids in, token ids out, with its branch in the headers."""

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from services.cli.replay.tokens import Tokens

RETRY_LIMIT = 8
"""How often a request that was turned away (429, 503) is sent again after the time it was told to wait."""


@dataclass(frozen=True, slots=True)
class Branch:
    """Identity of a request in the words of the request headers."""

    id: str
    version: int
    parent: str | None = None
    kind: str | None = None
    end: bool = False

    def headers(self) -> dict[str, str]:
        named = {"id": self.id, "version": str(self.version), "parent": self.parent, "kind": self.kind}
        if self.end:
            named["end"] = "true"
        return {f"x-ei-branch-{key}": value for key, value in named.items() if value is not None}


@dataclass(slots=True)
class Answer:
    """What came back; times are monotonic seconds. `error` is "" for a whole answer."""

    sent_at: float
    first_at: float | None = None
    ended_at: float = 0.0
    tokens: Tokens = field(default_factory=lambda: array("I"))
    finish: str = ""
    cached_tokens: int = 0
    prompt_tokens: int = 0
    request_id: str = ""
    prefill_node: str = ""
    decode_node: str = ""
    turned_away: int = 0
    error: str = ""


class _PromptDetails(msgspec.Struct):
    cached_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _ApiError(msgspec.Struct):
    message: str = ""


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _ApiError | None = None


_CHUNK = msgspec.json.Decoder(_Chunk)


class TurnedAway(Exception):
    """The server asked to come again later; `after_s` says when."""

    def __init__(self, after_s: float, text: str) -> None:
        super().__init__(text)
        self.after_s = after_s


class CompletionClient:
    """`/v1/completions` of a router (or a plain engine) with token ids, greedy, of a given length."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str) -> None:
        self._session, self._url, self.model = session, url.rstrip("/"), model

    async def complete(
        self, prompt: Tokens, length: int, branch: Branch | None, on_tokens: Callable[[Tokens], None]
    ) -> Answer:
        """Send `prompt` and read exactly `length` tokens; `on_tokens` is called as they arrive.

        Never raises for what the server or the network does: `Answer.error` says what happened.
        """
        answer = Answer(sent_at=time.monotonic())
        try:
            while True:
                try:
                    await self._attempt(answer, prompt, length, branch, on_tokens)
                    break
                except TurnedAway as away:
                    answer.turned_away += 1
                    if answer.turned_away > RETRY_LIMIT:
                        raise
                    await asyncio.sleep(away.after_s)
        except (aiohttp.ClientError, TimeoutError, TurnedAway, msgspec.MsgspecError, ConnectionError) as error:
            answer.error = f"{type(error).__name__}: {error}"
        answer.ended_at = time.monotonic()
        if not answer.error and len(answer.tokens) != length:
            answer.error = f"{len(answer.tokens)} of {length} tokens came (finish {answer.finish or 'missing'})"
        return answer

    async def end_branch(self, branch_id: str) -> None:
        """Tell the router that a branch is over."""
        async with self._session.delete(f"{self._url}/v1/branches/{branch_id}"):
            pass

    async def _attempt(
        self,
        answer: Answer,
        prompt: Tokens,
        length: int,
        branch: Branch | None,
        on_tokens: Callable[[Tokens], None],
    ) -> None:
        body = {
            "model": self.model,
            "prompt": prompt.tolist(),
            "max_tokens": length,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "ignore_eos": True,
        }
        headers = {"content-type": "application/json", **(branch.headers() if branch is not None else {})}
        url = f"{self._url}/v1/completions"
        async with self._session.post(url, data=msgspec.json.encode(body), headers=headers) as response:
            if response.status in (429, 503):
                raise TurnedAway(_retry_after_s(response), f"{response.status}: {await response.text()}")
            if response.status != 200:
                answer.error = f"HTTP {response.status}: {(await response.text())[:500]}"
                return
            answer.request_id = response.headers.get("x-request-id", "")
            answer.prefill_node = response.headers.get("x-ei-prefill-node", "")
            answer.decode_node = response.headers.get("x-ei-decode-node", "")
            async for data in _events(response.content):
                self._take(answer, _CHUNK.decode(data), on_tokens)

    def _take(self, answer: Answer, chunk: _Chunk, on_tokens: Callable[[Tokens], None]) -> None:
        if chunk.error is not None:
            answer.error = chunk.error.message or "error in the stream"
        if chunk.usage is not None:
            answer.prompt_tokens = chunk.usage.prompt_tokens
            if chunk.usage.prompt_tokens_details is not None:
                answer.cached_tokens = chunk.usage.prompt_tokens_details.cached_tokens
        for choice in chunk.choices:
            if choice.token_ids:
                if answer.first_at is None:
                    answer.first_at = time.monotonic()
                tokens = array("I", choice.token_ids)
                answer.tokens.extend(tokens)
                on_tokens(tokens)
            answer.finish = choice.finish_reason or answer.finish


def _retry_after_s(response: aiohttp.ClientResponse) -> float:
    try:
        return min(30.0, max(0.1, float(response.headers.get("retry-after", "1"))))
    except ValueError:
        return 1.0


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The data of server-sent events up to `[DONE]`."""
    async for line in content:
        if line.startswith(b"data:"):
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            yield data


async def get_json(session: aiohttp.ClientSession, url: str) -> Any:
    """GET a JSON document; aiohttp.ClientError names the URL and status."""
    async with session.get(url) as response:
        response.raise_for_status()
        return msgspec.json.decode(await response.read())
