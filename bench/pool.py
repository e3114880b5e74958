"""How fast a pool brings blocks here, and what its own work costs: `python -m bench.pool [--quick] [--json FILE]`.

Three pools as processes on one broker: b holds the blocks, a fetches them by mapping b's arena, c over Mooncake (TCP).
A fetch is timed as the engine sees it: call on the Unix socket, lease over NATS, copy, fingerprint of every block,
commit, answer. It is compared with what the machine can do at all, in the same round over as much memory: memcpy, and
one blocking socket between two processes, both without any check. Then the pool's own work. A fetch passes through
four processes: on a machine with other things to do it waits at each, and the ratios fall; see `load_average`.
"""

import argparse
import asyncio
import json
import os
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

from bench.pool_parts import core_figures, digests, lookup_us, loop_gap_ms, snapshot_figures, write_128_ms
from bench.pool_rivals import MEGABYTE, Memcpy, RawSocket
from schemas.pool import DIGEST_BYTES
from services.broker import Broker
from services.kvpool.settings import KvPoolSettings
from tests.pool_node import PoolClient, PoolProcess, connect, settings

BLOCKS = 16
SIZE = BLOCKS * MEGABYTE
SOURCES, TARGETS = 12, 4
RESULTS = Path(__file__).parent / "results"


class Cluster:
    """The broker and the three pools; chains of 16 blocks of 1 MB at b, room for four of them at a and c."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._broker = Broker(folder / "broker")
        self._pools: list[PoolProcess] = []
        self.clients: dict[str, PoolClient] = {}
        self.chains = [
            [packed[at : at + DIGEST_BYTES] for at in range(0, len(packed), DIGEST_BYTES)]
            for packed in (digests(f"chain {i}", BLOCKS) for i in range(SOURCES))
        ]

    def _settings(self, node: str, transport: str, blocks: int) -> KvPoolSettings:
        return settings(
            self._folder, node, transport=transport, block_bytes=MEGABYTE, capacity_blocks=blocks, debug_checks=False
        )

    async def start(self) -> None:
        url = self._broker.start()
        for node, transport, chains in (("b", "mooncake", SOURCES), ("a", "shm", TARGETS), ("c", "mooncake", TARGETS)):
            of = self._settings(node, transport, chains * BLOCKS)
            self._pools.append(await PoolProcess.start(of, url))
            self.clients[node] = await connect(of)
        for chain in self.chains:
            await self.clients["b"].write(chain)

    async def fetch(self, node: str, turn: int) -> tuple[float, float]:
        """Seconds of one fetch, as its engine saw it and as the pool says."""
        client, id_ = self.clients[node], f"fetch {turn}"
        loop = asyncio.get_running_loop()
        began = loop.time()
        reply = await client.fetch(id_, self.chains[turn % SOURCES], [("b", 0, BLOCKS)])
        took = loop.time() - began
        assert (reply.fetched, reply.transport) == (BLOCKS, "shm" if node == "a" else "mooncake"), reply
        await client.release(id_)
        return took, reply.took_s

    async def stop(self) -> None:
        for client in self.clients.values():
            await client.close()
        for pool in self._pools:
            await pool.kill()
        self._broker.kill()


async def transfers(folder: Path, rounds: int) -> dict[str, float]:
    """Median GB/s of 16 MB by each way, measured in turns."""
    cluster, memcpy, raw = Cluster(folder), Memcpy(SIZE, SOURCES, TARGETS), RawSocket(SIZE, SOURCES, TARGETS)
    taken: dict[str, list[float]] = {name: [] for name in ("memcpy", "shm", "shm_inside", "socket", "mooncake")}
    try:
        await cluster.start()
        for turn in range(SOURCES + rounds):
            near = await cluster.fetch("a", turn)
            far = await cluster.fetch("c", turn)
            row = {"memcpy": memcpy.seconds(turn), "shm": near[0], "shm_inside": near[1]}
            row |= {"socket": raw.seconds(turn), "mooncake": far[0]}
            if turn >= SOURCES:  # the first turns touch every page once
                for name, seconds in row.items():
                    taken[name].append(seconds)
    finally:
        raw.close()
        await cluster.stop()
    speed = {name: SIZE / statistics.median(seconds) / 1e9 for name, seconds in taken.items()}
    return {
        "fetch_over_socket": speed["mooncake"] / speed["socket"],
        "fetch_over_memcpy": speed["shm"] / speed["memcpy"],
        **{f"{name}_gb_per_s": value for name, value in speed.items()},
    }


async def socket_and_index(folder: Path, turns: int) -> dict[str, float]:
    """Allocate, commit and look up 128 blocks."""
    broker = Broker(folder / "broker")
    of = settings(folder, "calls", block_bytes=4096, capacity_blocks=20_000, debug_checks=False)
    pool = await PoolProcess.start(of, broker.start())
    try:
        client = await connect(of)
        allocate_ms, commit_ms = await write_128_ms(client, turns)
        looked_up_us = lookup_us(client.arena, digests(f"written {turns - 1}", 128), turns)
        await client.close()
    finally:
        await pool.kill()
        broker.kill()
    return {"lookup_128_us": looked_up_us, "allocate_128_ms": allocate_ms, "commit_128_ms": commit_ms}


async def measure(*, quick: bool) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="ei-bench-", dir="/dev/shm"))
    try:
        for name in ("transfers", "calls", "gap"):
            (folder / name).mkdir()
        figures: dict[str, Any] = await transfers(folder / "transfers", 24 if quick else 96)
        figures |= await socket_and_index(folder / "calls", 50 if quick else 400)
        figures |= {"loop_gap_max_ms": await loop_gap_ms(folder / "gap", 600 if quick else 2400)}
    finally:
        shutil.rmtree(folder)
    figures |= core_figures(100_000, 20_000 if quick else 100_000)
    figures |= snapshot_figures(100_000 if quick else 1_000_000)
    figures |= {"load_average": os.getloadavg()[0], "cores": os.cpu_count() or 0}
    return {key: round(value, 4) for key, value in figures.items()} | {"quick": quick}


def summary(figures: dict[str, Any]) -> str:
    """The result in one line."""
    return (
        f"16 MB in blocks of 1 MB: {figures['shm_gb_per_s']:.2f} GB/s from a peer's arena "
        f"({figures['fetch_over_memcpy']:.2f} of memcpy), {figures['mooncake_gb_per_s']:.2f} GB/s over Mooncake TCP "
        f"({figures['fetch_over_socket']:.2f} of a socket); look-up of 128 blocks {figures['lookup_128_us']:.0f} us; "
        f"{figures['evictions_per_s']:,.0f} evictions a second; load {figures['load_average']:.1f} on "
        f"{figures['cores']:.0f} cores"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.pool", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, under 50 s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the JSON line there too")
    arguments = parser.parse_args()
    figures = asyncio.run(measure(quick=arguments.quick))
    for key, value in figures.items():
        print(f"{key:24} {value}")
    print(said := summary(figures))
    line = json.dumps(figures)
    if not arguments.quick:
        RESULTS.mkdir(exist_ok=True)
        entry = {"command": "python -m bench.pool", "summary": said, **figures}
        (RESULTS / "pool.json").write_text(json.dumps(entry, indent=1) + "\n")
    if arguments.json is not None:
        arguments.json.write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
