"""A cluster of `ei up` as a subprocess, and a client that speaks token ids to it: what the system tests share."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import aiohttp

from services.cli.cluster.rundir import SHM, run_path, shm_prefix

EI = [sys.executable, "-m", "services.cli.main"]


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Answer:
    """What one request brought back; `output` are token ids."""

    output: list[int]
    cached_tokens: int
    prefill_node: str
    decode_node: str
    finish: str
    ttft_s: float
    took_s: float


class Cluster:
    """A running `ei up`; `url` serves HTTP."""

    def __init__(self, port: int, process: subprocess.Popen[bytes], session: aiohttp.ClientSession) -> None:
        self.port = port
        self.process = process
        self.session = session
        self.url = f"http://127.0.0.1:{port}"

    @classmethod
    @asynccontextmanager
    async def up(cls, *arguments: str, ready_s: float = 60) -> AsyncIterator[Self]:
        """Start `ei up ARGUMENTS` on a free port; at the end stop it by SIGINT and see that it left nothing behind."""
        port = free_port()
        command = [*EI, "up", "--port", str(port), *arguments]
        process = subprocess.Popen(command, start_new_session=True)  # noqa: ASYNC220 - fork and exec only
        timeout = aiohttp.ClientTimeout(total=600)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
            cluster = cls(port, process, session)
            try:
                await cluster._until_ready(ready_s)
                yield cluster
            finally:
                process.send_signal(signal.SIGINT)
                await asyncio.to_thread(process.wait, 60)
        assert process.returncode == 0, f"ei up ended with {process.returncode}"
        assert leftovers(port) == []

    async def _until_ready(self, ready_s: float) -> None:
        deadline = time.monotonic() + ready_s
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"ei up ended with {self.process.returncode}"
            state = run_path(self.port) / "cluster.json"
            if state.exists() and json.loads(state.read_text()).get("ready"):
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"not ready within {ready_s} s")

    def state(self) -> dict[str, Any]:
        """The cluster's own record: processes by name, and when it was ready."""
        record: dict[str, Any] = json.loads((run_path(self.port) / "cluster.json").read_text())
        return record

    def kill(self, process: str) -> int:
        """kill -9 one service by its name, e.g. `engine-node-0`; returns its former pid."""
        pid = int(self.state()["processes"][process]["pid"])
        os.kill(pid, signal.SIGKILL)
        return pid

    async def get(self, path: str) -> Any:
        async with self.session.get(self.url + path) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    async def metrics(self) -> str:
        async with self.session.get(self.url + "/metrics") as response:
            return await response.text()

    async def complete(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        branch: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> Answer:
        """One greedy streamed completion over token ids; the end-of-sequence token does not end it."""
        body = {
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        sent = dict(headers or {})
        if branch is not None:
            sent["x-ei-branch-id"] = branch
        start = time.monotonic()
        output: list[int] = []
        first: float | None = None
        usage: dict[str, Any] = {}
        finish = ""
        async with self.session.post(self.url + "/v1/completions", json=body, headers=sent) as response:
            if response.status != 200:
                raise RefusedRequest(response.status, await response.text(), dict(response.headers))
            async for line in response.content:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise BrokenStream(chunk["error"]["message"], output)
                usage = chunk.get("usage") or usage
                for choice in chunk.get("choices", []):
                    if choice.get("token_ids") and first is None:
                        first = time.monotonic() - start
                    output += choice.get("token_ids") or []
                    finish = choice.get("finish_reason") or finish
            names = response.headers
        return Answer(
            output,
            usage["prompt_tokens_details"]["cached_tokens"],
            names.get("x-ei-prefill-node", ""),
            names.get("x-ei-decode-node", ""),
            finish,
            first if first is not None else time.monotonic() - start,
            time.monotonic() - start,
        )

    async def command(self, *arguments: str, timeout_s: float = 120) -> str:
        """Run an `ei` command against this cluster and return what it printed."""
        child = await asyncio.create_subprocess_exec(
            *EI, *arguments, "--port", str(self.port), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        output, _ = await asyncio.wait_for(child.communicate(), timeout_s)
        assert child.returncode == 0, output.decode()
        return output.decode()

    async def phases(self) -> dict[str, str]:
        """The phase each node serves now, as the router sees it."""
        nodes = (await self.get("/v1/cluster"))["nodes"]
        return {node["node"]: node["phase"] for node in nodes}


class RefusedRequest(Exception):
    """An answer other than 200."""

    def __init__(self, status: int, text: str, headers: dict[str, str]) -> None:
        super().__init__(f"{status}: {text}")
        self.status, self.text, self.headers = status, text, headers


class BrokenStream(Exception):
    """A stream that ended with an error; `output` is what came before it."""

    def __init__(self, text: str, output: list[int]) -> None:
        super().__init__(text)
        self.output = output


def leftovers(port: int) -> list[str]:
    """What a stopped cluster should not leave: files, shared memory, processes that name its run directory."""
    run = run_path(port)
    found = [str(run)] if run.exists() else []
    found += [str(path) for path in SHM.glob(shm_prefix(port) + "*")]
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if str(run).encode() in line:
                found.append(f"process {entry.name}: {line[:200]!r}")
    return found
