"""Settings of `ei-planner`."""

from typing import ClassVar

from services.planner.core.options import PlannerSettings
from services.planner.core.windows import WindowSettings
from services.settings import ServiceSettings


class PlannerServiceSettings(ServiceSettings, kw_only=True):
    """Durations in seconds. A window is `slices` slices of `slice_s`; a source silent for longer than `max_gap_s`
    makes its slice unknown. `switch_timeout_s`: after it a switch is reported with the nodes that have not ended."""

    service: ClassVar[str] = "planner"

    node_timeout_s: float = 3.0
    switch_timeout_s: float = 600.0
    settle_s: float = 0.2
    block_size: int = 16
    slice_s: float = 60.0
    slices: int = 10
    max_gap_s: float = 5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("node_timeout_s", "switch_timeout_s", "slice_s", "slices", "max_gap_s", "block_size"):
            if getattr(self, key) <= 0:
                raise ValueError(f"`{key}` {getattr(self, key)} is not above 0")

    def policy(self) -> PlannerSettings:
        """The part the core reads."""
        return PlannerSettings(
            node_timeout_s=self.node_timeout_s,
            switch_timeout_s=self.switch_timeout_s,
            settle_s=self.settle_s,
            block_size=self.block_size,
            window=WindowSettings(slice_s=self.slice_s, slices=self.slices, max_gap_s=self.max_gap_s),
        )
