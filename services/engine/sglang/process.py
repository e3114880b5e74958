"""One SGLang engine as a child of this process: started, listened to, stopped, and swept up after. No torch here."""

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec

from services.engine.sglang import launch
from services.engine.sglang.config import PluginConfig, SglangSettings, WorkerConfig
from services.engine.sglang.frames import BadFrame, Capacity, Frame, Hello, Ready, Splitter, Stop, pack
from services.engine.sglang.leftovers import PREFIX, sweep
from services.engine.sglang.model import prepare

_WORKER = "services.engine.sglang.worker"
_RECEIVE_BYTES = 1 << 18
_LOG_LINES = 30


class EngineFailed(RuntimeError):
    """The engine did not start, or died; the text ends with the last lines of its log."""


class EngineProcess:
    """The worker process and SGLang's own processes below it; all of them die with this one.

    `on_frame` gets what the engine reports once it runs; `on_failed` is called once if it dies after its start.
    """

    def __init__(
        self,
        settings: SglangSettings,
        plugin: PluginConfig,
        on_frame: Callable[[Frame], None],
        on_failed: Callable[[str], None],
        *,
        folder: Path | None = None,
    ) -> None:
        self._settings = settings
        self._plugin = plugin
        self._on_frame = on_frame
        self._on_failed = on_failed
        self._folder = folder or Path(tempfile.gettempdir())
        self._scratch: Path | None = None
        self._server: asyncio.Server | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._writers: dict[str, asyncio.StreamWriter] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._ending = False
        self.rendezvous = ""
        self.model_path: Path
        self.ready: asyncio.Future[Ready]
        self.capacity: asyncio.Future[Capacity]

    @property
    def pid(self) -> int | None:
        """The worker's process id, also that of its process group; None before it was started."""
        return self._process.pid if self._process else None

    @property
    def log(self) -> str:
        """All that SGLang has printed so far."""
        path = self._scratch / "sglang.log" if self._scratch else None
        return path.read_text(errors="replace") if path and path.exists() else ""

    async def start(self) -> None:
        """Start the engine and wait until it takes requests; EngineFailed if it does not, with nothing left running."""
        loop = asyncio.get_running_loop()
        self.ready, self.capacity = loop.create_future(), loop.create_future()
        try:
            await asyncio.to_thread(sweep, self._folder)
            self._scratch = Path(tempfile.mkdtemp(dir=self._folder, prefix=f"{PREFIX}{os.getpid()}-"))
            await self._spawn(self._scratch)
            wanted = [self.ready] if self._plugin.plain else [self.ready, self.capacity]
            async with asyncio.timeout(self._settings.start_timeout_s):
                await asyncio.gather(*wanted)
        except TimeoutError:
            error = EngineFailed(self._with_log(f"not ready within {self._settings.start_timeout_s} s"))
            await self.stop()
            raise error from None
        except BaseException:
            await self.stop()
            raise

    async def _spawn(self, scratch: Path) -> None:
        settings, socket = self._settings, scratch / "engine.sock"
        self._server = await asyncio.start_unix_server(self._serve, str(socket))
        self.model_path = Path(settings.model_path) if settings.model_path else await asyncio.to_thread(prepare)
        port = settings.rendezvous_port or launch.free_port(settings.host)
        self.rendezvous = "" if self._plugin.plain else f"{settings.host}:{port}"
        plain = self._plugin.plain
        config = WorkerConfig(
            channel=str(socket),
            parent=os.getpid(),
            plain=plain,
            session_lease_s=settings.session_lease_s,
            server_args=launch.server_args(settings, self.model_path, plain=plain, rendezvous_port=port),
        )
        file = scratch / "worker.json"
        file.write_bytes(msgspec.json.encode(config))
        plugin = msgspec.structs.replace(self._plugin, channel=str(socket))
        with (scratch / "sglang.log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", _WORKER, "--config", str(file)),
                env=launch.environment(settings, plugin, scratch, os.environ),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._own(self._watch(self._process))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        splitter = Splitter()
        try:
            while data := await reader.read(_RECEIVE_BYTES):
                for frame in splitter.feed(data):
                    self._receive(frame, writer)
            self._fail("SGLang closed its connection")
        except (OSError, BadFrame) as error:
            self._fail(f"connection to SGLang: {error}")
        finally:
            writer.close()

    def _receive(self, frame: Frame, writer: asyncio.StreamWriter) -> None:
        if isinstance(frame, Hello):
            self._writers[frame.role] = writer
        elif isinstance(frame, Ready):
            self.ready.set_result(frame)
        elif isinstance(frame, Capacity):
            self.capacity.set_result(frame)
        else:
            self._on_frame(frame)

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        self._fail(f"SGLang's process ended with code {await process.wait()}")

    def _fail(self, text: str) -> None:
        """The engine is lost (nothing to do when it was to end): kill what is left of it and say so."""
        if self._ending:
            return
        self._ending = True
        error = EngineFailed(self._with_log(text))
        self._kill()
        started = self.ready.done() and (self._plugin.plain or self.capacity.done())
        for future in (self.ready, self.capacity):
            if not future.done():
                future.set_exception(error)
                future.exception()  # marks it as seen: nobody may wait for it
        if started:
            self._on_failed(str(error))

    def _kill(self) -> None:
        """Kill the worker's session: everything that SGLang started is in it."""
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def _with_log(self, text: str) -> str:
        return "\n".join([text, *self.log.splitlines()[-_LOG_LINES:]])

    def _own(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def send(self, role: str, frame: Frame) -> None:
        """Send a frame to the worker or the scheduler; nothing happens when the engine is gone."""
        writer = self._writers.get(role)
        if writer is not None and not writer.is_closing():
            writer.write(pack(frame))

    async def stop(self) -> None:
        """End all processes of the engine and remove its files. Safe at any time."""
        self._ending = True
        if self._process is not None:
            self.send("worker", Stop())
            try:
                async with asyncio.timeout(self._settings.stop_timeout_s if "worker" in self._writers else 0):
                    await self._process.wait()
            except TimeoutError:
                self._kill()
                await self._process.wait()
        if self._server is not None:
            self._server.close()
        for writer in self._writers.values():
            writer.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
            await asyncio.to_thread(sweep, self._folder)
