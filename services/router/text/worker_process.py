"""A process beside the router that runs a library too heavy for it: started when first asked, asked over a pipe."""

import asyncio
import contextlib
import itertools
import os
import sys
from typing import Any, ClassVar

from services.router.text.worker_frames import READ_BYTES, Frames, frame


class WorkerFailed(RuntimeError):
    """The process refused, or is gone; the text says why."""


class WorkerProcess:
    """One process for all questions; `module` is its program. It is started again when it has died; questions under way
    in it fail. What is asked in one turn of the event loop goes out in one write."""

    module: ClassVar[str]

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count(1)
        self._unsent: list[bytes] = []
        self._starting = asyncio.Lock()

    @property
    def running(self) -> bool:
        """Whether the process is there."""
        return self._process is not None and self._process.returncode is None

    async def ask(self, verb: str, key: str, payload: Any) -> Any:
        """One question. WorkerFailed."""
        if not self.running:
            await self._start()
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._send([number, verb, key, payload])
        try:
            return await answer
        finally:
            self._waiting.pop(number, None)

    def tell(self, verb: str, key: str) -> None:
        """Without waiting for an answer."""
        if self.running:
            self._send([next(self._numbers), verb, key, None])

    async def stop(self) -> None:
        """End the process."""
        process = self._process
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        if self._reading is not None:
            await asyncio.wait([self._reading])

    def _send(self, request: list[Any]) -> None:
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(frame(request))

    def _flush(self) -> None:
        """To a process that has died meanwhile this is no harm: all questions to it fail."""
        unsent, self._unsent = self._unsent, []
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(b"".join(unsent))

    async def _start(self) -> None:
        async with self._starting:
            if not self.running:
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

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        frames = Frames()
        with contextlib.suppress(ConnectionError):
            while data := await process.stdout.read(READ_BYTES):
                for number, error, result in frames.feed(data):
                    self._answered(number, error, result)
        code = await process.wait()
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(WorkerFailed(f"the process {self.module} ended with code {code}"))

    def _answered(self, number: int, error: str | None, result: Any) -> None:
        answer = self._waiting.get(number)
        if answer is None or answer.done():
            return
        if error is None:
            answer.set_result(result)
        else:
            answer.set_exception(WorkerFailed(error))
