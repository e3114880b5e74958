"""Dynamo's frontend with mocker workers, on loopback, from an environment of its own."""

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

ROOT = Path(__file__).resolve().parent.parent
PYTHON = ROOT / ".cache" / "dynamo" / "bin" / "python"
MODEL = "bench"
HOST, READY_S = "127.0.0.1", 120.0
NEEDS = """bench.tokens needs Dynamo 1.6.1 in an environment of its own:
  python3 -m venv .cache/dynamo
  .cache/dynamo/bin/pip install --no-deps ai-dynamo-runtime==1.6.1 ai-dynamo==1.6.1
  .cache/dynamo/bin/pip install -r requirements/bench-dynamo.txt
(or name its interpreter: --dynamo PYTHON)"""


def write_model(source: Path, folder: Path, context_tokens: int) -> Path:
    """A model folder for both sides: tokenizer and template of `source`, and a configuration without its limit."""
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(source / name, folder / name)
    config: dict[str, Any] = json.loads((source / "config.json").read_text())
    settings: dict[str, Any] = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": context_tokens}))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"model_max_length": context_tokens}))
    return folder


@contextlib.asynccontextmanager
async def dynamo(
    python: Path, model: Path, port: int, work: Path, block_size: int, *, cache: bool = True
) -> AsyncIterator[int]:
    """The pid of a frontend that serves `model` on `port` with its KV router. Its event sockets listen everywhere.

    `cache`: it keeps the tokens of prefixes that end at special tokens, as it does unless told otherwise.
    """
    store = work / f"dynamo-kv-{port}"
    environment = os.environ | {
        "DYN_TCP_RPC_HOST": HOST,
        "DYN_TCP_RESPONSE_STREAM_HOST": HOST,
        "DYN_EVENT_PLANE_HOST": HOST,
        "DYN_SYSTEM_HOST": HOST,
        "DYN_HTTP_RPC_HOST": HOST,
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(store),
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_EVENT_PLANE": "zmq",
        "DYN_NAMESPACE": "dynamo",
        "DYN_LOG": "warn",
        "DYN_DISABLE_TELEMETRY": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
    if not cache:
        environment["DYN_TOKENIZER_CACHE"] = "0"
    store.mkdir()
    workers = [
        *("dynamo.mocker", "--model-path", str(model), "--model-name", MODEL, "--num-workers", "2"),
        *("--block-size", str(block_size), "--speedup-ratio", "1000000", "--num-gpu-blocks-override", "200000"),
        *("--max-num-batched-tokens", "262144"),
    ]
    frontend = [
        *("dynamo.frontend", "--http-host", HOST, "--http-port", str(port)),
        *("--router-mode", "kv", "--kv-cache-block-size", str(block_size)),
    ]
    log = work / f"dynamo-{port}.log"
    started = []
    try:
        with log.open("wb") as out:
            for command in (workers, frontend):
                line = [str(python), "-m", *command]
                started.append(subprocess.Popen(line, stdout=out, stderr=out, env=environment))  # noqa: ASYNC220
        await _ready(started, port, log)
        yield started[1].pid
    finally:
        for process in started:
            process.terminate()
        for process in started:
            await asyncio.to_thread(process.wait, 30)


async def _ready(started: list[subprocess.Popen[bytes]], port: int, log: Path) -> None:
    deadline = time.monotonic() + READY_S
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < deadline and all(process.poll() is None for process in started):
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(f"http://{HOST}:{port}/v1/models") as response:
                    if MODEL in await response.text():
                        await asyncio.sleep(2)
                        return
            await asyncio.sleep(0.5)
    raise SystemExit(f"Dynamo did not answer within {READY_S:g} s:\n{_end_of(log)}")


def _end_of(log: Path) -> str:
    return log.read_text(errors="replace")[-2000:]
