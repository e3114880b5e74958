"""Settings of the timed engine."""

from typing import Annotated

import msgspec
from msgspec import Meta

from schemas.block_key import PAIRS, PLAIN
from services.engine.core.timing import PRESETS

Positive = Annotated[int, Meta(ge=1)]
Share = Annotated[float, Meta(ge=0, le=1)]


class TimedSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One timed engine.

    `preset` names the times (services.engine.core.timing.PRESETS); they are divided by `speed`. `l1_tokens` None takes
    the preset's. Answers are token ids from `lowest_token` to `highest_token`, printable ones by default; each token is
    `eos_token` with probability `eos_probability` instead, which ends the answer. `script`: a file of replies played
    instead where one matches (services.engine.timed.script). `tokenizer`: folder with the tokenizer.json to use, named
    to the router too; empty: one token per byte. `media_s`: what a picture adds to its prefill beyond its tokens.
    """

    preset: str = "laptop"
    speed: Annotated[float, Meta(gt=0)] = 1.0
    model: str = "timed"
    block_size: Positive = 16
    block_bytes: Positive = 4096
    key_version: str = PLAIN
    l1_tokens: Positive | None = None
    max_context_tokens: Positive = 32_768
    max_running: Positive = 16
    batch_tokens: Positive = 2048
    lowest_token: int = 32
    highest_token: int = 126
    eos_probability: Share = 0.0
    eos_token: int = 0
    script: str = ""
    tokenizer: str = ""
    media_s: Annotated[float, Meta(ge=0)] = 0.0

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            raise ValueError(f"timed.preset {self.preset!r} is none of {', '.join(PRESETS)}")
        if self.key_version not in (PLAIN, PAIRS):
            raise ValueError(f"timed.key_version {self.key_version!r} is neither {PLAIN!r} nor {PAIRS!r}")
        if not 0 <= self.lowest_token <= self.highest_token < 1 << 32:
            raise ValueError(f"timed tokens {self.lowest_token}..{self.highest_token} are not a range of u32")
        if self.device_tokens < self.max_context_tokens:
            raise ValueError(
                f"timed.l1_tokens {self.device_tokens} do not hold timed.max_context_tokens {self.max_context_tokens}"
            )

    @property
    def device_tokens(self) -> int:
        """KV tokens of device memory, in whole blocks."""
        tokens = self.l1_tokens or PRESETS[self.preset].l1_tokens or 65_536
        return tokens // self.block_size * self.block_size
