"""The process that owns one SGLang engine: `python -m services.engine.sglang.worker --config FILE`.

It builds `sglang.Engine` (which spawns the scheduler), connects to the backend's Unix socket and hands requests to
SGLang. What becomes of them the scheduler reports itself; only a plain engine's answers go out from here.
"""

import argparse
import asyncio
import logging
import multiprocessing
import os
import sys
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.managers.io_struct import CloseSessionReqInput, GenerateReqInput
from sglang.srt.plugins import load_plugins

from schemas.block_key import token_bytes, token_list
from schemas.phase import Phase
from schemas.serve import Finish, Sampling
from services.engine.sglang.config import WorkerConfig, plugin_config
from services.engine.sglang.frames import (
    Answer,
    Cancel,
    DropDecodeCache,
    Frame,
    Hello,
    Notice,
    Ready,
    Refused,
    Splitter,
    Stop,
    Submit,
    pack,
)
from services.engine.sglang.media import Placer, media_arguments
from services.engine.sglang.phase_hint import phase_hint, shortest_answer
from services.engine.sglang.plugin import die_with_parent, verify
from services.engine.sglang.sessions import Sessions

_RECEIVE_BYTES = 1 << 16
_RETRY_CANCEL_S = 0.05
_FINISHES = {"length": Finish.LENGTH, "stop": Finish.STOP}
_log = logging.getLogger(__name__)


class TokenEngine(Engine):  # type: ignore[misc] # SGLang has no types
    """SGLang's engine without its detokenizer process: tokens in, tokens out.

    Without a GPU the scheduler is forked instead of spawned: half the start time, and the imported code (0.5 GB) is
    there once. At that point this process has no threads and no sockets yet.
    """

    @classmethod
    def _launch_scheduler_processes(cls, server_args: Any, *args: Any, **rest: Any) -> Any:
        if server_args.device != "cpu" or threading.active_count() > 1:
            return super()._launch_scheduler_processes(server_args, *args, **rest)
        multiprocessing.set_start_method("fork", force=True)
        try:
            return super()._launch_scheduler_processes(server_args, *args, **rest)
        finally:
            multiprocessing.set_start_method("spawn", force=True)

    @classmethod
    def _launch_detokenizer_subprocesses(cls, *_args: Any, **_rest: Any) -> tuple[list[Any], list[str]]:
        return [], []


def sampling_params(sampling: Sampling) -> dict[str, Any]:
    """Our sampling in SGLang's words."""
    parameters: dict[str, Any] = {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "ignore_eos": sampling.ignore_eos,
        "stop_token_ids": sampling.stop_token_ids or None,
    }
    if sampling.top_k is not None:
        parameters["top_k"] = sampling.top_k
    if sampling.min_new_tokens:
        parameters["custom_params"] = shortest_answer(sampling.min_new_tokens)
    if sampling.seed is not None:
        parameters["sampling_seed"] = sampling.seed
    return parameters


def generate_input(submit: Submit, rendezvous_port: int) -> Any:
    """SGLang's request for one leg (or for a whole request of a plain engine)."""
    arguments: dict[str, Any] = {
        "rid": submit.rid,
        "input_ids": token_list(submit.tokens),
        "sampling_params": sampling_params(submit.sampling),
        "stream": False,
        "session_id": submit.session,
        "cache_salt": submit.cache_salt,
        "extra_key": submit.extra_key,
    }
    if submit.media:
        arguments |= media_arguments(submit.tokens, submit.media, submit.data)
    if submit.phase is not None:
        host, _, port = submit.rendezvous.rpartition(":")
        arguments |= {
            "bootstrap_host": host,
            "bootstrap_port": rendezvous_port if submit.phase is Phase.PREFILL else int(port),
            "bootstrap_room": submit.room,
            "kv_hints": phase_hint(submit.rid, submit.phase),
        }
    return GenerateReqInput(**arguments)


class Worker:
    """Requests of one engine. Runs on SGLang's own event loop."""

    def __init__(self, engine: Any, config: WorkerConfig) -> None:
        self._engine = engine
        self._manager = engine.tokenizer_manager
        self._config = config
        processor = None if config.plain else self._manager.mm_processor
        self._placer = None if processor is None else Placer(processor, lambda text: self._send(Notice(text=text)))
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._orders: set[asyncio.Task[None]] = set()
        self._rpc = asyncio.Lock()
        self._sessions = Sessions(config.session_lease_s)
        self._writer: asyncio.StreamWriter

    async def run(self) -> None:
        """Serve until the backend says stop or is gone."""
        reader, self._writer = await asyncio.open_unix_connection(self._config.channel)
        self._send(Hello(role="worker", pid=os.getpid()))
        model = self._manager.model_config
        eos = model.hf_eos_token_id or ()
        self._send(Ready(eos_token_ids=sorted(eos), max_context_tokens=model.context_len))
        splitter = Splitter()
        while data := await reader.read(_RECEIVE_BYTES):
            for frame in splitter.feed(data):
                if isinstance(frame, Stop):
                    return
                self._take(frame)

    def _send(self, frame: Frame) -> None:
        self._writer.write(pack(frame))

    def _take(self, frame: Frame) -> None:
        if isinstance(frame, Submit):
            self._tasks[frame.rid] = asyncio.create_task(self._serve(frame))
        elif isinstance(frame, Cancel) and frame.rid in self._tasks:
            self._own(self._cancel(frame.rid))
        elif isinstance(frame, DropDecodeCache):
            self._own(self._call_schedulers("drop_decode_cache"))

    def _own(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._orders.add(task)
        task.add_done_callback(self._orders.discard)

    async def _call_schedulers(self, method: str) -> None:
        """Call a method of the scheduler on every rank; SGLang's RPC takes one call at a time and blocks."""
        async with self._rpc:
            await asyncio.to_thread(self._engine.collective_rpc, method)

    async def _serve(self, submit: Submit) -> None:
        try:
            await self._close_sessions(submit.session)
            if self._placer is not None:
                self._placer.expect(submit.rid, submit.tokens, submit.media)
            outputs = self._manager.generate_request(await self._input(submit))
            last = [output async for output in outputs][-1]
            if self._config.plain:
                self._send(_answer(submit.rid, last))
        except Exception as error:  # noqa: BLE001 (a bad request must not end the engine)
            self._send(Refused(rid=submit.rid, reason=f"{type(error).__name__}: {error}"))
        finally:
            del self._tasks[submit.rid]
            if self._placer is not None:
                self._placer.forget(submit.rid)

    async def _input(self, submit: Submit) -> Any:
        """Images may have to be turned, which takes as long as their pixels."""
        if not submit.data:
            return generate_input(submit, self._rendezvous_port)
        return await asyncio.to_thread(generate_input, submit, self._rendezvous_port)

    @property
    def _rendezvous_port(self) -> int:
        return int(self._config.server_args.get("disaggregation_bootstrap_port", 0))

    async def _close_sessions(self, session: str | None) -> None:
        now = asyncio.get_running_loop().time()
        for old in self._sessions.superseded(session, now):
            await self._manager.close_session(CloseSessionReqInput(session_id=old))

    async def _cancel(self, rid: str) -> None:
        """Ask until it has ended: an abort that overtakes its own request finds nothing in the scheduler."""
        while rid in self._tasks:
            state = self._manager.rid_to_state.get(rid)
            if state is not None:
                state.abort_sent = False
                self._manager.abort_request(rid=rid)
            await asyncio.sleep(_RETRY_CANCEL_S)


def _answer(rid: str, output: dict[str, Any]) -> Answer:
    meta = output["meta_info"]
    reason = meta["finish_reason"] or {}
    return Answer(
        rid=rid,
        finish=_FINISHES.get(reason.get("type", ""), Finish.ERROR),
        tokens=token_bytes(output["output_ids"]),
        cached_tokens=meta.get("cached_tokens", 0),
        reason=str(reason.get("message", "")),
    )


def build(config: WorkerConfig) -> Any:
    """The engine, with every hook checked. Raises IncompatibleSglang by name of what does not fit."""
    plugin = plugin_config(os.environ)
    if plugin is None:
        raise RuntimeError("the worker was started without its plug-in configuration")
    load_plugins()
    verify(plugin)
    return TokenEngine(**config.server_args)


def main() -> int:
    """Build the engine, serve, shut down."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--config", type=Path, required=True)
    config = msgspec.json.decode(parser.parse_args().config.read_bytes(), type=WorkerConfig)
    die_with_parent()
    if os.getppid() != config.parent:
        return 1
    engine = build(config)
    Path(engine.tokenizer_manager.load_snapshot_reader.path).unlink(missing_ok=True)  # mapped by both sides by now
    try:
        engine.loop.run_until_complete(Worker(engine, config).run())
    finally:
        engine.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
