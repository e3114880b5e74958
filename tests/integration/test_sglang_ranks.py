"""One copy of a block per node, whatever the parallel layout: ranks write it together into a real pool and read it."""

import asyncio
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from services.bus import MemoryBus, MemoryHub
from tests.pool_node import attach, running, settings
from tests.pool_world import context

torch = pytest.importorskip("torch")

from services.engine.sglang.blocks import BlockLayout  # noqa: E402
from services.engine.sglang.store import ArenaStore  # noqa: E402
from services.engine.sglang.writer import BlockWriter  # noqa: E402

PAGE, PAGES, WIDTH, SIZE = 16, 12, 8, 2


class MHATokenToKVPool:
    """KV of the heads of one rank, as SGLang's class of this name holds it."""

    def __init__(self, seed: int) -> None:
        self.k_buffer, self.v_buffer = ([_tensor(seed + layer + 100 * half) for layer in range(2)] for half in range(2))


class MLATokenToKVPool:
    """Latent KV, the same on all ranks of a group."""

    def __init__(self, seed: int) -> None:
        self.kv_buffer = [_tensor(seed + layer) for layer in range(2)]


def _tensor(seed: int) -> Any:
    return torch.rand((PAGE * PAGES, 1, WIDTH), generator=torch.Generator().manual_seed(seed))


class Group:
    """Ranks that are threads: what each says meets what the others say."""

    def __init__(self, size: int) -> None:
        self.size, self.said = size, [None] * size
        self._all = threading.Barrier(size, timeout=20)

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self.said[rank] = value
        self._all.wait()
        said = list(self.said)
        self._all.wait()
        return said


class Rank:
    """A stand-in for Ranks."""

    def __init__(self, group: Group, rank: int) -> None:
        self.rank, self.size, self._group = rank, group.size, group

    def from_first(self, value: Any) -> Any:
        return self._group.exchange(self.rank, value)[0]

    def least(self, values: list[int]) -> list[int]:
        return [min(each) for each in zip(*self._group.exchange(self.rank, values), strict=True)]


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "sglang.srt.mem_cache.memory_pool"
    for end in [index for index, letter in enumerate(name) if letter == "."]:
        monkeypatch.setitem(sys.modules, name[:end], ModuleType(name[:end]))
    module = ModuleType(name)
    vars(module).update(MHATokenToKVPool=MHATokenToKVPool, MLATokenToKVPool=MLATokenToKVPool)
    monkeypatch.setitem(sys.modules, name, module)


def together(group: Group) -> list[Rank]:
    return [Rank(group, rank) for rank in range(group.size)]


@pytest.mark.parametrize(
    ("kind", "ranks", "seeds"),
    [
        pytest.param(MLATokenToKVPool, lambda: together(Group(SIZE)), (0, 0), id="TP, replicated"),
        pytest.param(MHATokenToKVPool, lambda: together(Group(SIZE)), (0, 1000), id="TP, sharded"),
        pytest.param(MLATokenToKVPool, lambda: [Rank(Group(1), 0) for _ in range(SIZE)], (0, 0), id="attention-DP"),
    ],
)
async def test_all_ranks_write_one_copy_and_each_reads_its_own_part(
    tmp_path: Path, kind: Any, ranks: Any, seeds: Sequence[int]
) -> None:
    members: list[Rank] = ranks()
    pools = [kind(seed) for seed in seeds]
    layouts = [BlockLayout([pool], PAGE, rank.rank, rank.size) for pool, rank in zip(pools, members, strict=True)]
    of = settings(tmp_path, "n", block_bytes=layouts[0].block_bytes, transport="shm")
    digests = context("shared", PAGES)
    indices = torch.arange(PAGE * PAGES)
    async with running(of, MemoryBus(MemoryHub())) as node:
        stores = [ArenaStore(of.socket_path, attach(of, "storage")) for _ in members]
        writers = [BlockWriter(*each) for each in zip(stores, layouts, members, strict=True)]  # type: ignore[arg-type]
        await asyncio.gather(*(asyncio.to_thread(writer.write, digests, b"", indices) for writer in writers))
        assert node.pool.store.core.status().used_blocks == PAGES, "one copy per node, not per rank"
        for store, layout, pool in zip(stores, layouts, pools, strict=True):
            slots = store.lookup(digests)
            staging = layout.staging(PAGES)
            assert store.read(slots, list(staging.numpy()), layout.offset) == PAGES
            written = layout.staging(PAGES)
            layout.gather(indices, written)
            assert torch.equal(staging, written), f"{type(pool).__name__} of rank at offset {layout.offset}"
            store.close()
        node.pool.store.core.check()
