"""Conversations of agents as chat requests, and a small client that reads answers of any length."""

import asyncio
import json
import random
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

BASE_TOKENS, TURN_TOKENS = 100_000, 2_000
_CHARACTERS_PER_TOKEN = 3.0


@dataclass(frozen=True)
class Turn:
    """One request of a conversation: its messages, and its body as JSON."""

    messages: list[dict[str, Any]]
    body: bytes


class Corpus:
    """Text as agents read it: the standard library's sources, from a place drawn by `seed`."""

    def __init__(self, library: Tokenizer, seed: int) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        self._random, self._library = random.Random(seed), library
        self._text = "".join(file.read_text(errors="replace") for file in files)

    def text(self, tokens: int) -> str:
        """About so many tokens of text."""
        size = int(tokens * _CHARACTERS_PER_TOKEN)
        start = self._random.randrange(len(self._text) - 2 * size)
        found = self._text[start : start + size]
        per_token = len(found) / max(1, len(self._library.encode(found, add_special_tokens=False).ids))
        return self._text[start : start + int(tokens * per_token)]


def conversation(library: Tokenizer, model: str, turns: int, seed: int) -> list[Turn]:
    """A first request of 100,000 tokens in messages as agents have them, then turns that add 2,000 tokens each."""
    corpus = Corpus(library, seed)
    messages: list[dict[str, Any]] = [{"role": "system", "content": corpus.text(12_000)}]
    tokens = 12_000
    while tokens < BASE_TOKENS:
        messages += _exchange(corpus, 200, 800)
        tokens += 1_000
    found = []
    for _ in range(turns + 1):
        asked = [*messages, {"role": "user", "content": corpus.text(20)}]
        body = {"model": model, "messages": asked, "max_tokens": 1, "temperature": 0}
        found.append(Turn(asked, json.dumps(body).encode()))
        messages = [*asked, *_exchange(corpus, TURN_TOKENS // 4, TURN_TOKENS * 3 // 4)]
    return found


def _exchange(corpus: Corpus, said: int, returned: int) -> list[dict[str, Any]]:
    """What the model said, and what a tool returned."""
    return [
        {"role": "assistant", "content": corpus.text(said)},
        {"role": "user", "content": corpus.text(returned)},
    ]


class Client:
    """One kept-alive connection to `/v1/chat/completions`."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, body: bytes) -> dict[str, Any]:
        """Send and read the answer; RuntimeError unless it is a 200."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, self._port, limit=1 << 22)
        reader, writer = self._streams
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: {self._host}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        await writer.drain()
        told = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = told.partition(b"content-length:")[2].partition(b"\r\n")[0].strip()
        data = await reader.readexactly(int(length)) if length else await _chunks(reader)
        if b" 200 " not in told[:20]:
            raise RuntimeError(f"port {self._port}: {told[:40]!r} {data[:300]!r}")
        found: dict[str, Any] = json.loads(data)
        return found

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    data = b""
    while size := int(await reader.readline(), 16):
        data += (await reader.readexactly(size + 2))[:-2]
    await reader.readline()
    return data


async def ask_all(host: str, port: int, bodies: Sequence[bytes], clients: int) -> tuple[float, list[int]]:
    """Ask everything, `clients` at a time; seconds it took and the prompt tokens that each answer counts."""
    counted = [0] * len(bodies)
    waiting = list(range(len(bodies)))[::-1]

    async def work() -> None:
        client = Client(host, port)
        while waiting:
            number = waiting.pop()
            counted[number] = (await client.ask(bodies[number]))["usage"]["prompt_tokens"]
        client.close()

    begun = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(clients):
            tasks.create_task(work())
    return time.perf_counter() - begun, counted
