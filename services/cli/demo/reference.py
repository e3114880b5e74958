"""Plain engines that the demo's answers are held against."""

import tempfile
from pathlib import Path

from schemas.serve import Sampling
from services.engine.sglang.config import SglangSettings
from services.engine.sglang.plain import PlainEngine


class PlainSglang:
    """One unchanged SGLang: no disaggregation, no pool; the same model, dtype and chunk size as the cluster."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ei-plain-")
        self._engine = PlainEngine(SglangSettings(), folder=Path(self._folder.name))

    async def start(self) -> None:
        await self._engine.start()

    async def generate(self, prompt: list[int], length: int) -> list[int]:
        sampling = Sampling(max_new_tokens=length, temperature=0.0, ignore_eos=True)
        return (await self._engine.generate(prompt, sampling)).tokens

    async def stop(self) -> None:
        await self._engine.stop()
        self._folder.cleanup()
