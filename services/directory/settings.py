"""Settings of `ei-directory`."""

from typing import ClassVar

from services.directory.core.directory import DirectoryConfig
from services.settings import ServiceSettings


class DirectorySettings(ServiceSettings, kw_only=True):
    """Durations in seconds.

    `state_dir`: where the checkpoint is kept, "" for nowhere: then a restart replays the whole stream of branch events.
    `see_after_s`: how long after a start nodes may take to say hello before the directory stops being blind.
    `remember_blocks`: keys remembered of blocks that lie nowhere and are claimed by nobody.
    `takeover_s`: of two directories the older stands by, and serves again when the newer is silent for so long.
    `pending_messages`: location messages that may wait to be handled; more are dropped and repaired by snapshot.
    `scarce_share`: a pool where claimed blocks take this share of its memory is told what each of them is worth; above
    1 never. `depth_doubling_tokens`: at this depth of a context a block counts twice as much as at its start, because
    it costs more to compute again.
    """

    service: ClassVar[str] = "directory"

    state_dir: str = ""
    checkpoint_s: float = 30.0
    see_after_s: float = 1.0
    node_timeout_s: float = 3.0
    branch_lease_s: float = 1800.0
    pending_lease_s: float = 600.0
    remember_blocks: int = 4_000_000
    inactive_branches: int = 100_000
    takeover_s: float = 3.0
    snapshots_at_once: int = 8
    snapshot_timeout_s: float = 5.0
    pending_messages: int = 65_536
    scarce_share: float = 0.8
    depth_doubling_tokens: int = 500_000

    def __post_init__(self) -> None:
        super().__post_init__()
        positive = (
            "checkpoint_s",
            "node_timeout_s",
            "branch_lease_s",
            "pending_lease_s",
            "takeover_s",
            "snapshots_at_once",
            "snapshot_timeout_s",
            "pending_messages",
            "scarce_share",
            "depth_doubling_tokens",
        )
        for key in positive:
            if getattr(self, key) <= 0:
                raise ValueError(f"`{key}` {getattr(self, key)} is not above 0")
        for key in ("see_after_s", "remember_blocks", "inactive_branches"):
            if getattr(self, key) < 0:
                raise ValueError(f"`{key}` {getattr(self, key)} is negative")

    def core(self) -> DirectoryConfig:
        """The part that the core reads."""
        return DirectoryConfig(
            remember_blocks=self.remember_blocks,
            branch_lease_s=self.branch_lease_s,
            pending_lease_s=self.pending_lease_s,
            node_timeout_s=self.node_timeout_s,
            inactive_branches=self.inactive_branches,
            scarce_share=self.scarce_share,
            depth_doubling_tokens=self.depth_doubling_tokens,
        )
