"""Settings of `ei-planner`."""

from typing import ClassVar

import msgspec

from schemas.phase import Split
from services.planner.core.decide import LEAST_SLICES
from services.planner.core.options import (
    DRY_RUN,
    MODES,
    Above,
    DecideSettings,
    ModelSettings,
    NotBelow0,
    PlannerSettings,
)
from services.planner.core.windows import WindowSettings
from services.settings import ServiceSettings


class PlannerServiceSettings(ServiceSettings, kw_only=True):
    """Durations in seconds. A window is `slices` slices of `slice_s`; a source silent for longer than `max_gap_s`
    makes its slice unknown. `switch_timeout_s`: after it a switch is reported with the nodes that have not ended.

    `mode` is on, off or dry-run until an order says otherwise: dry-run learns, decides and publishes, and orders
    nothing. In mode on, unless `warm_up` is false, nodes run both phases until their models are there; then
    `initial_split` is ordered (empty: two thirds of the nodes prefill). `model` and `decide` are tables.
    """

    service: ClassVar[str] = "planner"

    node_timeout_s: Above = 3.0
    switch_timeout_s: Above = 600.0
    settle_s: NotBelow0 = 0.2
    block_size: int = 16
    slice_s: Above = 60.0
    slices: int = 10
    max_gap_s: Above = 5.0
    mode: str = DRY_RUN
    initial_split: str = ""
    warm_up: bool = True
    model: ModelSettings = msgspec.field(default_factory=ModelSettings)
    decide: DecideSettings = msgspec.field(default_factory=DecideSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("node_timeout_s", "switch_timeout_s", "slice_s", "slices", "max_gap_s", "block_size"):
            if getattr(self, key) <= 0:
                raise ValueError(f"`{key}` {getattr(self, key)} is not above 0")
        if self.slices < LEAST_SLICES:
            raise ValueError(f"`slices` {self.slices}: a decision needs {LEAST_SLICES}")
        if 0 < self.decide.early_slices < LEAST_SLICES:
            raise ValueError(f"`decide.early_slices` {self.decide.early_slices}: a decision needs {LEAST_SLICES}")
        if self.decide.early_slices > self.slices:
            raise ValueError(
                f"`decide.early_slices` {self.decide.early_slices} is more than a window has: {self.slices}"
            )
        if self.mode not in MODES:
            raise ValueError(f"`mode` {self.mode!r} is none of {', '.join(MODES)}")
        if self.initial_split:
            split = Split.parse(self.initial_split)
            if not (split.prefill and split.decode):
                raise ValueError(f"`initial_split` {self.initial_split!r} leaves a phase without a node")

    def policy(self) -> PlannerSettings:
        """The part the core reads."""
        return PlannerSettings(
            node_timeout_s=self.node_timeout_s,
            switch_timeout_s=self.switch_timeout_s,
            settle_s=self.settle_s,
            block_size=self.block_size,
            window=WindowSettings(slice_s=self.slice_s, slices=self.slices, max_gap_s=self.max_gap_s),
            mode=self.mode,
            initial_split=self.initial_split or None,
            warm_up=self.warm_up,
            model=self.model,
            decide=self.decide,
        )
