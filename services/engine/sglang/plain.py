"""A stock SGLang engine for comparisons: no disaggregation, no pool; our CPU hook, chunk size and dtype."""

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from schemas.block_key import token_bytes, token_list
from schemas.media import Medium
from schemas.serve import Finish, Sampling
from services.engine.sglang.config import PluginConfig, SglangSettings
from services.engine.sglang.frames import Answer, Frame, Refused, Submit
from services.engine.sglang.process import EngineFailed, EngineProcess


@dataclass(frozen=True)
class PlainAnswer:
    """What a plain engine generated; `cached_tokens` of the prompt came out of its radix cache."""

    tokens: list[int]
    cached_tokens: int
    finish: Finish


class PlainEngine:
    """`await generate(tokens, sampling)` on an unchanged SGLang scheduler; `upstream_attention` unhooks even that."""

    def __init__(
        self, settings: SglangSettings, *, upstream_attention: bool = False, folder: Path | None = None
    ) -> None:
        plugin = PluginConfig(plain=True, device=settings.device, channel="", cpu_attention=not upstream_attention)
        self._process = EngineProcess(settings, plugin, self._frame, self._failed, folder=folder)
        self._numbers = itertools.count(1)
        self._waiting: dict[str, asyncio.Future[PlainAnswer]] = {}

    @property
    def pid(self) -> int | None:
        """The process id of SGLang's main process."""
        return self._process.pid

    async def start(self) -> None:
        """Start the engine; EngineFailed if it does not come up."""
        await self._process.start()

    async def generate(
        self, tokens: list[int], sampling: Sampling, media: Sequence[Medium] = (), data: Sequence[bytes] = ()
    ) -> PlainAnswer:
        """The whole answer to a prompt, with `media` in it whose bytes are `data`. EngineFailed when SGLang refuses it
        or dies."""
        rid = f"{next(self._numbers):08x}"
        future: asyncio.Future[PlainAnswer] = asyncio.get_running_loop().create_future()
        self._waiting[rid] = future
        prompt = token_bytes(tokens)
        self._process.send(
            "worker", Submit(rid=rid, tokens=prompt, sampling=sampling, media=list(media), data=list(data))
        )
        return await future

    async def stop(self) -> None:
        """End the engine."""
        await self._process.stop()
        self._failed("the engine was stopped")

    def _frame(self, frame: Frame) -> None:
        if isinstance(frame, Answer):
            answer = PlainAnswer(token_list(frame.tokens), frame.cached_tokens, frame.finish)
            self._waiting.pop(frame.rid).set_result(answer)
        elif isinstance(frame, Refused):
            self._waiting.pop(frame.rid).set_exception(EngineFailed(frame.reason))

    def _failed(self, reason: str) -> None:
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            future.set_exception(EngineFailed(reason))
