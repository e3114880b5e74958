"""Settings of `ei-directory`."""

from typing import ClassVar

from services.directory.core.directory import DirectoryConfig
from services.settings import ServiceSettings


class DirectorySettings(ServiceSettings, kw_only=True):
    """Durations in seconds. `state_dir`: where checkpoints are kept, "" for nowhere. `see_after_s`: how long after a
    start hellos of nodes are collected before the directory may stop being blind."""

    service: ClassVar[str] = "directory"

    state_dir: str = ""
    node_timeout_s: float = 3.0
    branch_lease_s: float = 1800.0
    pending_lease_s: float = 600.0
    remember_blocks: int = 4_000_000
    see_after_s: float = 1.0
    snapshots_at_once: int = 8

    def core(self) -> DirectoryConfig:
        """The part the core reads."""
        return DirectoryConfig(
            remember_blocks=self.remember_blocks,
            branch_lease_s=self.branch_lease_s,
            pending_lease_s=self.pending_lease_s,
            node_timeout_s=self.node_timeout_s,
        )
