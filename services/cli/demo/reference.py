"""Plain engines that the demo's answers are held against."""

import hashlib
import tempfile
from array import array
from collections.abc import Sequence
from pathlib import Path

from schemas.block_key import block_digests
from schemas.serve import Sampling
from services.cli.demo.compare import Reference
from services.engine.sglang.config import SglangSettings
from services.engine.sglang.plain import PlainEngine
from services.engine.timed.settings import TimedSettings


class PlainSglang:
    """One unchanged SGLang: no disaggregation, no pool; the same model, dtype and chunk size as the cluster."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ei-plain-")
        self._engine = PlainEngine(SglangSettings(), folder=Path(self._folder.name))

    async def start(self) -> None:
        await self._engine.start()

    async def generate(self, prompt: list[int], length: int) -> tuple[list[int], int]:
        sampling = Sampling(max_new_tokens=length, temperature=0.0, ignore_eos=True)
        answer = await self._engine.generate(prompt, sampling)
        return answer.tokens, answer.cached_tokens

    async def stop(self) -> None:
        await self._engine.stop()
        self._folder.cleanup()


class TimedRule:
    """What a timed engine answers, from the rule alone: no cache, no cluster, no time."""

    async def start(self) -> None:
        """Nothing to start."""

    async def generate(self, prompt: list[int], length: int) -> tuple[list[int], int]:
        return timed_answer(prompt, length, TimedSettings()), 0

    async def stop(self) -> None:
        """Nothing to stop."""


def reference_of(engine: str) -> Reference:
    """The plain engine beside a cluster of `engine`."""
    return PlainSglang() if engine == "sglang" else TimedRule()


def timed_answer(prompt: Sequence[int], length: int, settings: TimedSettings) -> list[int]:
    """Each token follows from the digest of the last full block and the tokens after it."""
    size, answer = settings.block_size, []
    digest, tail = b"", array("I", prompt)
    for _ in range(length):
        if full := len(tail) // size * size:
            digest = block_digests(tail[:full].tobytes(), size, digest, settings.key_version)[-1]
            del tail[:full]
        number = int.from_bytes(hashlib.sha256(digest + tail.tobytes()).digest()[:8], "big")
        token = settings.lowest_token + number % (settings.highest_token - settings.lowest_token + 1)
        answer.append(token)
        tail.append(token)
    return answer
