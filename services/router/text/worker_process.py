"""A process beside the router that runs a library too heavy for it: started when first asked, asked over a pipe."""

import asyncio
import contextlib
import itertools
import os
import sys
from typing import Any, ClassVar

import msgspec

from services.router.text.worker_frames import LENGTH


class WorkerFailed(RuntimeError):
    """The process refused, or is gone; the text says why."""


class WorkerProcess:
    """One process for all questions; `module` is its program. It is started again when it has died; questions under way
    in it fail."""

    module: ClassVar[str]

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count(1)
        self._starting = asyncio.Lock()

    @property
    def running(self) -> bool:
        """Whether the process is there."""
        return self._process is not None and self._process.returncode is None

    async def ask(self, verb: str, key: str, payload: Any) -> Any:
        """One question. WorkerFailed."""
        process = await self._running()
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._send(process, [number, verb, key, payload])
        try:
            return await answer
        finally:
            self._waiting.pop(number, None)

    def tell(self, verb: str, key: str) -> None:
        """Without waiting for an answer."""
        if self._process is not None and self._process.returncode is None:
            self._send(self._process, [next(self._numbers), verb, key, None])

    async def stop(self) -> None:
        """End the process."""
        process = self._process
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        if self._reading is not None:
            await asyncio.wait([self._reading])

    @staticmethod
    def _send(process: asyncio.subprocess.Process, request: list[Any]) -> None:
        assert process.stdin is not None
        data = msgspec.msgpack.encode(request)
        process.stdin.write(LENGTH.pack(len(data)) + data)

    async def _running(self) -> asyncio.subprocess.Process:
        async with self._starting:
            if self._process is None or self._process.returncode is not None:
                pipe = asyncio.subprocess.PIPE
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    self.module,
                    stdin=pipe,
                    stdout=pipe,
                    env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
                )
                self._reading = asyncio.create_task(self._read(self._process), name=f"answers of {self.module}")
            return self._process

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                (length,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
                number, error, result = msgspec.msgpack.decode(await process.stdout.readexactly(length))
                answer = self._waiting.get(number)
                if answer is None or answer.done():
                    continue
                if error is None:
                    answer.set_result(result)
                else:
                    answer.set_exception(WorkerFailed(error))
        code = await process.wait()
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(WorkerFailed(f"the process {self.module} ended with code {code}"))
