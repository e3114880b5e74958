"""`ei-engine`: the engine of one node."""

import sys

from services.app import App, command
from services.engine.core.timing import PRESETS
from services.engine.node_pool import NodePool
from services.engine.service import EngineService
from services.engine.settings import EngineSettings
from services.engine.timed.backend import TimedBackend
from services.engine.timed.store import ArenaBlocks, NoBlocks
from services.engine.timed.worker_api import WorkerApi


def build(app: App[EngineSettings]) -> EngineService:
    """The service around the engine that the settings name."""
    path = app.settings.pool_path
    pool = NodePool(path, app.log) if path is not None else None
    if app.settings.engine == "sglang":
        return _sglang(app, pool)
    return _timed(app, pool)


def _sglang(app: App[EngineSettings], pool: NodePool | None) -> EngineService:
    from services.engine.sglang.backend import SglangBackend

    return EngineService(app, SglangBackend(app.settings.sglang, pool_socket=app.settings.pool_path), pool)


def _timed(app: App[EngineSettings], pool: NodePool | None) -> EngineService:
    settings = app.settings.timed
    store = ArenaBlocks(pool, settings.block_bytes) if pool is not None else NoBlocks()
    backend = TimedBackend(settings, store, app.clock)
    app.metrics.gauge(
        "wrong_blocks_count", "Blocks of host memory with other bytes.", read=lambda: backend.wrong_blocks
    )
    app.metrics.gauge("wrong_tokens_count", "First tokens that do not follow.", read=lambda: backend.wrong_tokens)
    worker = WorkerApi(backend, app.clock)
    times = PRESETS[settings.preset].times.faster(settings.speed)
    return EngineService(app, backend, pool, times=times, tap=worker.tap, routes=worker.routes)


def main() -> int:
    """Run the service until it is stopped."""
    return command(EngineSettings, build)


if __name__ == "__main__":
    sys.exit(main())
