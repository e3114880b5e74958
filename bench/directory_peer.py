"""Dynamo's RadixTree, as its Python wheel offers it."""

import json
from collections.abc import Sequence
from typing import Any

from dynamo.llm import RadixTree

from bench.directory_load import Keys, Stored


class Peer:
    """Events as JSON bytes, a context as a list of integers. `apply_event` only queues, so a match ends every lot."""

    def __init__(self, nodes: int) -> None:
        self._tree = RadixTree()
        self._events = 0

    def stored(self, stored: Stored) -> tuple[int, bytes]:
        blocks = [{"block_hash": key, "tokens_hash": key} for key in stored.keys.tolist()]
        return self._event(stored.node, {"stored": {"parent_hash": stored.parent, "blocks": blocks}})

    def removed(self, stored: Stored) -> tuple[int, bytes]:
        return self._event(stored.node, {"removed": {"block_hashes": stored.keys.tolist()[::-1]}})

    def apply(self, messages: Sequence[tuple[int, bytes]], at_once: int | None = None) -> None:
        for worker, event in messages:
            self._tree.apply_event(worker, event)
        self._tree.find_matches([1])

    def question(self, number: int, keys: Keys) -> list[int]:
        return keys.tolist()

    def ask(self, question: list[int]) -> Any:
        return self._tree.find_matches(question)

    def after(self, question: list[int]) -> None:
        """A match leaves nothing behind."""

    def found(self, answer: Any) -> int:
        return max(answer.scores.values(), default=0)

    def settle(self, contexts: list[Keys]) -> None:
        """It knows no branches."""

    def _event(self, node: int, data: dict[str, Any]) -> tuple[int, bytes]:
        self._events += 1
        return node, json.dumps({"event_id": self._events, "dp_rank": 0, "data": data}).encode()
