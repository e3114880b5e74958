"""Prompts that break at a changing token: noticed, counted, logged with the words, and listed for whoever asks."""

from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from services.observe import Metrics, RateLimitedLog
from services.router.core.identity import Identity
from services.router.core.stability import Stability

LISTED = 100
_SHOWN_CHARACTERS = 60
Decode = Callable[[Sequence[int]], str]


class PromptBreak(msgspec.Struct, frozen=True, kw_only=True):
    """`position`: the number of the token at which prompts break; `before` and `now`: what stood there, shortened.

    `branch`: the branch or family it was seen in, None where requests name neither. `t`: Unix seconds.
    """

    tenant: str
    branch: str | None
    dialect: str
    position: int
    before: str
    now: str
    t: float


class PromptBreaks:
    """Looks at every prompt on its way in."""

    def __init__(self, metrics: Metrics, log: RateLimitedLog) -> None:
        self._stability, self._log = Stability(), log
        self._found: deque[PromptBreak] = deque(maxlen=LISTED)
        self._count = metrics.counter("prompt_breaks_total", "Branches whose prompts break at a changing token.")

    def observe(self, identity: Identity, packed: bytes, decode: Decode, wall: float) -> None:
        """A prompt of tokens (u32)."""
        name = identity.branch or identity.family
        found = self._stability.observe((identity.tenant, name), packed)
        if found is None:
            return
        said = PromptBreak(
            tenant=identity.tenant,
            branch=name,
            dialect=identity.dialect,
            position=found.position,
            before=_text(found.before, decode),
            now=_text(found.now, decode),
            t=wall,
        )
        self._found.append(said)
        self._count.inc()
        self._log.warning(
            "prompt_breaks", kind=name or "", branch=name, position=found.position, before=said.before, now=said.now
        )

    def listed(self, tenant: str) -> list[PromptBreak]:
        """The last ones of a tenant, newest first."""
        return [found for found in reversed(self._found) if found.tenant == tenant]


def _text(packed: bytes, decode: Decode) -> str:
    text = decode(np.frombuffer(packed, dtype="<u4").tolist())
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."
