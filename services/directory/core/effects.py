"""What the directory asks its shell to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class NeedSnapshot:
    """Ask this node for everything it holds; answer with `on_snapshot` parts, or `on_snapshot_failed`."""

    node: str
    reason: str


class ReferencesChanged(NamedTuple):
    """Tell this node's pool about copies in its L2 (packed keys). `full` first: all it knew before is void."""

    node: str
    referenced: bool
    unreachable: bool
    keys: bytes
    full: bool = False


class ValuesChanged(NamedTuple):
    """Tell this node's pool what copies in its L2 (packed keys) are worth while they are `referenced`, or are not."""

    node: str
    value: int
    referenced: bool
    keys: bytes


@dataclass(frozen=True, slots=True)
class NodeRefused:
    """This node is not of this cluster; `text` names both values."""

    node: str
    text: str


@dataclass(frozen=True, slots=True)
class NodeLost:
    """Nothing was heard of this node for too long: its copies are taken for gone."""

    node: str
    silent_s: float


Effect = NeedSnapshot | ReferencesChanged | ValuesChanged | NodeRefused | NodeLost
