"""A service process that owns one SGLang engine, to be killed: `python sglang_service.py FOLDER`."""

import asyncio
import sys
from pathlib import Path

from services.engine.sglang.config import SglangSettings
from services.engine.sglang.plain import PlainEngine


async def main() -> None:
    engine = PlainEngine(SglangSettings(l1_tokens=1024, context_tokens=512), folder=Path(sys.argv[1]))
    await engine.start()
    sys.stdout.write(f"ready {engine.pid}\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


asyncio.run(main())
