"""A small HTTP client and load for the router bench: one way of asking, whoever answers."""

import asyncio
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

BodyOf = Callable[[list[int], int], dict[str, Any]]
SHARED = 0.8


@dataclass(frozen=True)
class Endpoint:
    """Where requests go, and how a prompt is said there."""

    host: str
    port: int
    path: str
    body: BodyOf

    def request(self, prompt: list[int], tokens: int) -> bytes:
        body = json.dumps(self.body(prompt, tokens)).encode()
        head = (
            f"POST {self.path} HTTP/1.1\r\nhost: {self.host}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


def sglang_body(prompt: list[int], tokens: int) -> dict[str, Any]:
    """SGLang's `/generate`."""
    return {"input_ids": prompt, "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True}}


def openai_body(prompt: list[int], tokens: int) -> dict[str, Any]:
    """`/v1/completions`."""
    return {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True}


class Connection:
    """One kept-alive connection; answers are read to their end."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, request: bytes) -> None:
        """Send and read the answer; RuntimeError unless it is a 200 with a body."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._endpoint.host, self._endpoint.port)
        reader, writer = self._streams
        writer.write(request)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = head.partition(b"content-length:")[2].partition(b"\r\n")[0].strip()
        body = await reader.readexactly(int(length)) if length else b""
        if not head.startswith(b"http/1.1 200") or not body:
            raise RuntimeError(f"{self._endpoint.path}: {head[:40]!r} {body[:200]!r}")

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()


class Prompts:
    """Prompts of `tokens` token ids of which four fifths are shared by one in `groups`; every request is new."""

    def __init__(self, tokens: int, groups: int = 8, seed: int = 1) -> None:
        self._random = random.Random(seed)
        shared = int(tokens * SHARED)
        self._own = tokens - shared
        self._groups = [[self._random.randrange(100, 4000) for _ in range(shared)] for _ in range(groups)]

    def next(self) -> list[int]:
        group = self._random.choice(self._groups)
        return group + [self._random.randrange(100, 4000) for _ in range(self._own)]


async def latencies_ms(endpoint: Endpoint, prompts: Prompts, count: int, tokens: int) -> list[float]:
    """One request after the other."""
    connection = Connection(endpoint)
    found = []
    for _ in range(count):
        request = endpoint.request(prompts.next(), tokens)
        start = time.perf_counter()
        await connection.ask(request)
        found.append((time.perf_counter() - start) * 1e3)
    connection.close()
    return found


async def throughput(endpoint: Endpoint, prompts: Prompts, clients: int, seconds: float, tokens: int) -> float:
    """Requests per second of `clients` that ask without a pause; bodies are made beforehand."""
    ready = [endpoint.request(prompts.next(), tokens) for _ in range(256)]
    until = time.perf_counter() + seconds
    count = 0

    async def ask(start: int) -> None:
        nonlocal count
        connection, number = Connection(endpoint), start
        while time.perf_counter() < until:
            await connection.ask(ready[number % len(ready)])
            number += clients
            count += 1
        connection.close()

    async with asyncio.TaskGroup() as group:
        for client in range(clients):
            group.create_task(ask(client))
    return count / seconds


def percentile(values: list[float], share: float) -> float:
    return float(np.percentile(values, share))
