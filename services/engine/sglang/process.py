"""One SGLang engine as a child of this process: started, listened to, stopped, and swept up after. No torch here."""

import asyncio
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec

from services.engine.sglang import launch
from services.engine.sglang.config import PluginConfig, SglangSettings, WorkerConfig
from services.engine.sglang.frames import BadFrame, Capacity, Frame, Hello, Ready, Splitter, Stop, pack
from services.engine.sglang.model import prepare

_PREFIX = "ei-sglang-"
_WORKER = "services.engine.sglang.worker"
_LOG_LINES = 30


class EngineFailed(RuntimeError):
    """The engine did not start, or died; the text ends with the last lines of its log."""


class EngineProcess:
    """The worker process and SGLang's own processes below it; all of them die with this one.

    `on_frame` gets every frame but the greetings; `on_failed` is called once if the engine dies after its start.
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
        self._scratch: Path
        self._writers: dict[str, asyncio.StreamWriter] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False
        self.rendezvous = ""
        self.model_path: Path
        self.ready: asyncio.Future[Ready]
        self.capacity: asyncio.Future[Capacity]

    async def start(self) -> None:
        """Start the engine and wait until it takes requests. EngineFailed if it does not within the time allowed."""
        loop = asyncio.get_running_loop()
        self.ready, self.capacity = loop.create_future(), loop.create_future()
        sweep(self._folder)
        self._scratch = Path(tempfile.mkdtemp(dir=self._folder, prefix=f"{_PREFIX}{os.getpid()}-"))
        self._log = self._scratch / "sglang.log"
        socket = self._scratch / "engine.sock"
        self._server = await asyncio.start_unix_server(self._serve, str(socket))
        self._process = await self._spawn(socket)
        self._own(self._watch())
        wanted = [self.ready] if self._plugin.plain else [self.ready, self.capacity]
        try:
            async with asyncio.timeout(self._settings.start_timeout_s):
                await asyncio.gather(*wanted)
        except TimeoutError:
            text = f"not ready within {self._settings.start_timeout_s} s"
            raise EngineFailed(self._with_log(text)) from None

    async def _spawn(self, socket: Path) -> asyncio.subprocess.Process:
        settings = self._settings
        self.model_path = Path(settings.model_path) if settings.model_path else await asyncio.to_thread(prepare)
        port = settings.rendezvous_port or launch.free_port(settings.host)
        self.rendezvous = "" if self._plugin.plain else f"{settings.host}:{port}"
        config = WorkerConfig(
            channel=str(socket),
            parent=os.getpid(),
            plain=self._plugin.plain,
            rendezvous_host=settings.host,
            session_lease_s=settings.session_lease_s,
            server_args=launch.server_args(settings, self.model_path, plain=self._plugin.plain, rendezvous_port=port),
        )
        file = self._scratch / "worker.json"
        file.write_bytes(msgspec.json.encode(config))
        plugin = msgspec.structs.replace(self._plugin, channel=str(socket))
        with self._log.open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", _WORKER, "--config", str(file)),
                env=launch.environment(settings, plugin, self._scratch, os.environ),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        splitter = Splitter()
        try:
            while data := await reader.read(1 << 18):
                for frame in splitter.feed(data):
                    self._receive(frame, writer)
        except (OSError, BadFrame) as error:
            self._fail(f"connection to the engine: {error}")
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

    async def _watch(self) -> None:
        code = await self._process.wait()
        self._fail(f"SGLang's process ended with code {code}")

    def _fail(self, text: str) -> None:
        if self._stopping:
            return
        self._stopping = True
        error = EngineFailed(self._with_log(text))
        started = self.ready.done() and (self._plugin.plain or self.capacity.done())
        for future in (self.ready, self.capacity):
            if not future.done():
                future.set_exception(error)
                future.exception()
        if started:
            self._on_failed(str(error))

    def _with_log(self, text: str) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-_LOG_LINES:] if self._log.exists() else []
        return "\n".join([text, *lines])

    def _own(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def send(self, role: str, frame: Frame) -> None:
        """Send a frame to the worker or the scheduler; nothing happens when the engine is gone."""
        writer = self._writers.get(role)
        if writer is not None and not writer.is_closing():
            writer.write(pack(frame))

    @property
    def pid(self) -> int:
        """The worker's process id."""
        return self._process.pid

    async def stop(self) -> None:
        """End all processes of the engine and remove its files. Safe after a failed start."""
        self._stopping = True
        if hasattr(self, "_process"):
            self.send("worker", Stop())
            try:
                async with asyncio.timeout(self._settings.stop_timeout_s if "worker" in self._writers else 0):
                    await self._process.wait()
            except TimeoutError:
                if self._process.returncode is None:
                    self._process.kill()
                await self._process.wait()
        if hasattr(self, "_server"):
            self._server.close()
        for writer in self._writers.values():
            writer.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if hasattr(self, "_scratch"):
            shutil.rmtree(self._scratch, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Remove what engines left whose service was killed: their sockets, logs and SGLang's temporary files."""
    for leftover in folder.glob(f"{_PREFIX}*"):
        pid = leftover.name.removeprefix(_PREFIX).split("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(leftover, ignore_errors=True)
