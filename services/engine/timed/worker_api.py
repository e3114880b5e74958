"""The HTTP worker API that sglang-router expects, on the timed engine: so that both routers can be measured over the
same workers. Requests that come in here bypass the node's queue; production traffic comes over the bus.
"""

import asyncio
import itertools
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from schemas.block_key import block_digests, token_bytes
from schemas.kv import LocationChange
from schemas.phase import Phase
from schemas.serve import Finish, RequestState, Sampling
from schemas.telemetry import Iteration
from services.clock import Clock
from services.engine.backend import BackendEvents, Leg, LegKey
from services.engine.timed.backend import TimedBackend

PREFIX = "http-worker-"
_DONE = b"data: [DONE]\n\n"


class _Params(msgspec.Struct):
    """The sampling parameters that matter to an engine without a model."""

    max_new_tokens: int = 128
    ignore_eos: bool = True


class _Generate(msgspec.Struct):
    """SGLang's `/generate`; what is not named here, bootstrap fields included, is accepted and ignored."""

    input_ids: list[int]
    sampling_params: _Params = msgspec.field(default_factory=_Params)
    stream: bool = False
    rid: str = ""


@dataclass(slots=True, eq=False)
class _Open:
    """One HTTP request: news of it arrive in `queue`, None at its end."""

    leg: Leg
    tokens: list[int] = field(default_factory=list)
    queue: asyncio.Queue[list[int] | None] = field(default_factory=asyncio.Queue)
    cached_tokens: int = 0
    finish: Finish | None = None
    reason: str = ""
    ended: int = 0


class WorkerApi:
    """Runs HTTP requests on the engine beside those of the node's queue, first come, first served."""

    def __init__(self, backend: TimedBackend, clock: Clock) -> None:
        self._backend, self._clock = backend, clock
        self._numbers = itertools.count(1)
        self._open: dict[str, _Open] = {}
        self._waiting: deque[_Open] = deque()
        self._events: BackendEvents

    def tap(self, events: BackendEvents) -> BackendEvents:
        """Stand between the engine and `events`, and keep what is ours."""
        self._events = events
        return self

    def routes(self) -> list[BaseRoute]:
        info, server = self._model_info, self._server_info
        return [
            Route("/generate", self._generate, methods=["POST"]),
            *(Route(path, info) for path in ("/model_info", "/get_model_info")),
            *(Route(path, server) for path in ("/server_info", "/get_server_info")),
        ]

    # HTTP

    async def _model_info(self, _: Request) -> Response:
        model = self._backend.info.model
        return JSONResponse({"model_path": model, "tokenizer_path": "", "is_generation": True})

    async def _server_info(self, _: Request) -> Response:
        info = self._backend.info
        body = {
            "model_path": info.model,
            "served_model_name": info.model,
            "max_total_num_tokens": info.l1_tokens,
            "max_running_requests": info.max_running,
            "context_length": info.max_context_tokens,
            "page_size": info.block_size,
            "tp_size": info.ranks,
            "dp_size": 1,
            "version": "timed",
        }
        return JSONResponse(body)

    async def _generate(self, request: Request) -> Response:
        try:
            asked = msgspec.json.decode(await request.body(), type=_Generate)
            opened = self._opened(asked)
        except (msgspec.MsgspecError, ValueError) as error:
            return JSONResponse({"error": {"message": str(error)}}, status_code=400)
        started = self._clock.now()
        self._waiting.append(opened)
        self._admit()
        if asked.stream:
            return StreamingResponse(self._stream(opened, asked.rid), media_type="text/event-stream")
        try:
            while await opened.queue.get() is not None:
                pass
        finally:
            self._close(opened)
        return JSONResponse(self._body(opened, asked.rid) | {"e2e_latency": self._clock.now() - started})

    async def _stream(self, opened: _Open, rid: str) -> Any:
        try:
            while await opened.queue.get() is not None:
                yield b"data: " + msgspec.json.encode(self._body(opened, rid)) + b"\n\n"
            yield b"data: " + msgspec.json.encode(self._body(opened, rid)) + b"\n\n" + _DONE
        finally:
            self._close(opened)

    def _body(self, opened: _Open, rid: str) -> dict[str, Any]:
        finish = None
        if opened.finish is not None:
            finish = {"type": opened.finish.value, "length": len(opened.tokens)}
        meta = {
            "id": rid or opened.leg.key.id,
            "prompt_tokens": opened.leg.prompt_tokens,
            "completion_tokens": len(opened.tokens),
            "cached_tokens": opened.cached_tokens,
            "finish_reason": finish,
        }
        return {"text": "", "output_ids": list(opened.tokens), "meta_info": meta}

    # The engine

    def _opened(self, asked: _Generate) -> _Open:
        info = self._backend.info
        prompt, new = len(asked.input_ids), asked.sampling_params.max_new_tokens
        if not prompt or new < 1:
            raise ValueError(f"{prompt} input_ids and max_new_tokens {new}: both must be at least 1")
        if prompt + new > info.max_context_tokens:
            raise ValueError(f"{prompt} input_ids + {new} new tokens exceed the context of {info.max_context_tokens}")
        try:
            tokens = token_bytes(asked.input_ids)
        except (OverflowError, TypeError) as error:
            raise ValueError(f"input_ids are not all u32: {error}") from error
        leg = Leg(
            key=LegKey(f"{PREFIX}{next(self._numbers)}", 1, Phase.DECODE),
            tokens=tokens,
            prompt_tokens=prompt,
            sampling=Sampling(max_new_tokens=new, ignore_eos=asked.sampling_params.ignore_eos),
            room=0,
            peer="",
            rendezvous="",
            digests=tuple(block_digests(tokens, info.block_size, key_version=info.key_version)),
        )
        return _Open(leg)

    def _admit(self) -> None:
        """Both legs of a request enter together: they share their memory."""
        info = self._backend.info
        while self._waiting:
            leg = self._waiting[0].leg
            need = leg.prompt_tokens + leg.sampling.max_new_tokens + info.block_size
            if len(self._open) >= info.max_running or need > self._backend.room(Phase.DECODE):
                return
            opened = self._waiting.popleft()
            self._open[leg.key.id] = opened
            self._backend.submit(leg)
            self._backend.submit(replace(leg, key=leg.key._replace(phase=Phase.PREFILL)))

    def _close(self, opened: _Open) -> None:
        """The client is gone, or has its answer."""
        if opened in self._waiting:
            self._waiting.remove(opened)
        if opened.leg.key.id in self._open:
            for phase in (Phase.PREFILL, Phase.DECODE):
                self._backend.cancel(opened.leg.key._replace(phase=phase))

    # Events

    def state(self, key: LegKey, state: RequestState) -> None:
        if key.id not in self._open:
            self._events.state(key, state)

    def tokens(self, key: LegKey, first_index: int, tokens: list[int]) -> None:
        opened = self._open.get(key.id)
        if opened is None:
            self._events.tokens(key, first_index, tokens)
        elif key.phase is Phase.PREFILL:
            self._backend.prefilled(opened.leg.key, tokens[0])
        else:
            opened.tokens += tokens
            opened.queue.put_nowait(tokens)

    def ended(self, key: LegKey, finish: Finish, reason: str, cached_tokens: int, restored_tokens: int) -> None:
        opened = self._open.get(key.id)
        if opened is None:
            self._events.ended(key, finish, reason, cached_tokens, restored_tokens)
            self._admit()
            return
        opened.ended += 1
        if key.phase is Phase.PREFILL:
            opened.cached_tokens = cached_tokens
        if key.phase is Phase.DECODE or finish is Finish.ERROR:
            opened.finish, opened.reason = finish, reason
        if opened.ended == 2:
            del self._open[key.id]
            opened.queue.put_nowait(None)
            self._admit()
        elif finish is Finish.ERROR:
            self._backend.cancel(opened.leg.key)

    def iteration(self, iteration: Iteration) -> None:
        self._events.iteration(iteration)

    def device_changes(self, changes: list[LocationChange]) -> None:
        self._events.device_changes(changes)

    def failed(self, reason: str) -> None:
        self._events.failed(reason)
