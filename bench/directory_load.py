"""What both indexes are given: contexts of agents, in blocks, and the order in which nodes report them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.uint64]
BLOCK_TOKENS = 64
CONTEXT_TOKENS = 100_000
EVENT_BLOCKS = 128
"""Blocks of one event: a chunk of 8,192 tokens."""
CHURN_LIVE_BLOCKS = 2_400
CHURN_RUN_BLOCKS = 120


class Stored(NamedTuple):
    """A run of blocks that a node reports, behind block `parent`."""

    node: int
    parent: int | None
    keys: Keys


@dataclass(frozen=True)
class Load:
    """`contexts` as keys; `stores` in the order reported. Every node holds what all contexts share."""

    nodes: int
    contexts: list[Keys]
    stores: list[Stored]

    @property
    def blocks(self) -> int:
        """Block copies reported."""
        return sum(len(stored.keys) for stored in self.stores)


def contexts(blocks: int, nodes: int) -> Load:
    """Contexts of 100,000 tokens on one node after the other; all share the first quarter (instructions, tools)."""
    rng = np.random.default_rng(1)
    depth = CONTEXT_TOKENS // BLOCK_TOKENS
    common = depth // 4
    shared = _keys(rng, common)
    found: list[Keys] = []
    stores: list[Stored] = []
    for number in range((blocks - common) // (depth - common)):
        tail = _keys(rng, depth - common)
        found.append(np.concatenate([shared, tail]))
        node, first = number % nodes, number < nodes
        stores += _events(node, None if first else int(shared[-1]), found[-1] if first else tail)
    return Load(nodes, found, stores)


def agents(blocks: int, nodes: int) -> Load:
    """Agents whose contexts grow by turns of 2,000 tokens, fork, and end at 100,000: many runs, most of them short."""
    rng = np.random.default_rng(2)
    depth, turn = CONTEXT_TOKENS // BLOCK_TOKENS, 2_000 // BLOCK_TOKENS
    shared = _keys(rng, 20_000 // BLOCK_TOKENS)
    live: list[tuple[Keys, int]] = []
    found: list[Keys] = []
    stores: list[Stored] = []
    has_shared: set[int] = set()
    made = len(shared)
    while made < blocks:
        made += turn
        if len(live) < 90 or rng.random() < 0.03:
            node, before = int(rng.integers(nodes)), shared
            stores += [] if node in has_shared else _events(node, None, shared)
            has_shared.add(node)
            place = len(live)
        else:
            place = int(rng.integers(len(live)))
            before, node = live[place]
            if rng.random() < 0.1:
                node = int(rng.integers(nodes))
                before = before[: int(rng.integers(len(shared), len(before)))]
                stores += _events(node, None, before)
                has_shared.add(node)
                place = int(rng.integers(len(live)))
        context = np.concatenate([before, _keys(rng, turn)])
        stores += _events(node, int(before[-1]), context[len(before) :])
        if place >= len(live):
            live.append((context, node))
            if len(live) > 90:
                found.append(live.pop(int(rng.integers(90)))[0])
        elif len(context) + turn > depth:
            found.append(context)
            live[place] = live[-1]
            live.pop()
        else:
            live[place] = context, node
    return Load(nodes, found + [context for context, _ in live], stores)


def churn(runs: int) -> Iterator[Stored]:
    """Fresh contexts of one node, one after the other."""
    rng = np.random.default_rng(3)
    for _ in range(runs):
        yield Stored(0, None, _keys(rng, CHURN_RUN_BLOCKS))


def _keys(rng: np.random.Generator, count: int) -> Keys:
    return rng.integers(0, 1 << 64, count, np.uint64)


def _events(node: int, parent: int | None, keys: Keys) -> Iterator[Stored]:
    for start in range(0, len(keys), EVENT_BLOCKS):
        part = keys[start : start + EVENT_BLOCKS]
        yield Stored(node, parent, part)
        parent = int(part[-1])


SHAPES = {"contexts": contexts, "agents": agents}
