"""Which blocks are in device memory, told in our own keys: stands in for SGLang's KV event recorder.

SGLang's own events carry another hash as soon as a salt or an adapter is set. Tree nodes know the right one: their
`hash_value` is the chain of our block key (see page_hash), from the tokens and the parent's last digest.
"""

from typing import Any

from schemas.block_key import pack_keys, short_key
from schemas.kv import ChangeType, LocationChange, Tier


class DeviceEventRecorder:
    """Collects changes of tier l1 in order. Same calls as SGLang's recorder; `take` gives its publishers nothing."""

    enabled = True

    def __init__(self, *, page_size: int, **_rest: Any) -> None:
        self.page_size = page_size
        self._changes: list[LocationChange] = []

    def record_store(self, node: Any, medium: Any = None, *, session_id: str | None = None) -> None:
        """The blocks of a tree node came to device memory."""
        if _on_device(medium) and node.key is not None:
            parent = node.parent.hash_value if node.parent is not None else None
            self._changes.append(
                LocationChange(
                    type=ChangeType.STORED,
                    tier=Tier.L1,
                    hashes=pack_keys(self._digests(node)),
                    parent=short_key(bytes.fromhex(parent[-1])) if parent else None,
                )
            )

    def record_remove(self, node: Any, medium: Any = None) -> None:
        """The blocks of a tree node left device memory."""
        if _on_device(medium) and node.key is not None:
            self._changes.append(
                LocationChange(type=ChangeType.REMOVED, tier=Tier.L1, hashes=pack_keys(self._digests(node)))
            )

    def record_all_cleared(self) -> None:
        """Device memory holds no block any more."""
        self._changes.append(LocationChange(type=ChangeType.CLEARED, tier=Tier.L1))

    def take(self) -> list[Any]:
        """What SGLang's own publishers would send: nothing."""
        return []

    def drain(self) -> list[LocationChange]:
        """All changes since the last call."""
        changes, self._changes = self._changes, []
        return changes

    def _digests(self, node: Any) -> list[bytes]:
        if node.hash_value is None:
            from sglang.srt.mem_cache.utils import compute_node_hash_values

            node.hash_value = compute_node_hash_values(node, self.page_size)
        return [bytes.fromhex(digest) for digest in node.hash_value]


def _on_device(medium: Any) -> bool:
    return medium is None or str(getattr(medium, "value", medium)).upper() == "GPU"
