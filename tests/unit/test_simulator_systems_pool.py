"""The index of a shared pool, Mooncake's Algorithm 1, and the pool behind Dynamo's router."""

from array import array
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.serve import FetchSource
from services.simulator.systems.mooncake import Mooncake
from services.simulator.systems.pool_index import PoolIndex
from services.simulator.systems.pool_lru import PoolLru
from tests.system_stage import StillCluster, call, placed


def packed(*keys: int) -> bytes:
    return array("Q", keys).tobytes()


def test_sources_join_prompt_and_answer_of_different_nodes() -> None:
    index = PoolIndex()
    index.stored("p1", packed(*range(100)))
    index.stored("d0", packed(*range(100, 110)))
    keys = array("Q", range(120))
    assert index.leading(keys, 120) == 110
    assert index.leading(keys, 50) == 50
    assert index.sources(keys, 0, 110, "p0") == (
        FetchSource(node="p1", first=0, last=100),
        FetchSource(node="d0", first=100, last=110),
    )
    index.removed("p1", packed(*range(90, 100)))
    assert index.leading(keys, 120) == 90
    index.cleared("p1")
    assert index.leading(keys, 120) == 0


@given(st.integers(0, 1 << 30))
def test_the_index_agrees_with_sets(seed: int) -> None:
    random, index = Random(seed), PoolIndex()
    held: dict[str, set[int]] = {"a": set(), "b": set(), "c": set()}
    for _ in range(20):
        node, first = random.choice("abc"), random.randrange(30)
        keys = set(range(first, min(30, first + random.randint(1, 12))))
        if random.random() < 0.7:
            index.stored(node, packed(*sorted(keys)))
            held[node] |= keys
        else:
            index.removed(node, packed(*sorted(keys)))
            held[node] -= keys
    anybody = set().union(*held.values())
    expected = next((key for key in range(30) if key not in anybody), 30)
    context = array("Q", range(30))
    assert index.leading(context, 30) == expected
    own = next((key for key in range(expected) if key not in held["a"]), expected)
    covered: set[int] = set()
    for source in index.sources(context, own, expected, "a"):
        assert source.node != "a"
        assert set(range(source.first, source.last)) <= held[source.node]
        covered |= set(range(source.first, source.last))
    assert set(range(own, expected)) - covered <= held["a"]


def test_mooncake_fetches_where_the_queue_is_shorter_than_the_transfer() -> None:
    cluster, system = StillCluster(2, 1), Mooncake()
    system.begin(cluster, 0.0)
    request = call(128_000)
    system.stored("p0", "l2", None, request.keys[:1900].tobytes(), 0.0)
    cluster["p0"].holds[request.id] = (0, 1900)
    place = placed(system.arrived(request, 0.0))[request.id]
    assert place.prefill == "p0"
    assert place.fetch == ()
    again = call(128_000, keys=request.keys)
    cluster["p0"].holds[again.id] = (0, 1900)
    place = placed(system.arrived(again, 0.0))[again.id]
    assert place.prefill == "p1", "0.4 s of queue against 59 ms of transfer"
    assert place.fetch == (FetchSource(node="p0", first=0, last=1900),)
    transfer_s = 1900 * 64 * 48_408 / 1e11
    own_s = 0.1 + 6_400 * 3.4e-5 + (6_400 * 121_600 + 6_400 * 6_401 / 2) * 2.35e-10 + 121_600 * 2e-7
    assert place.predicted_ttft_s == pytest.approx(transfer_s + own_s)


def test_mooncake_computes_what_is_hardly_more_elsewhere() -> None:
    cluster, system = StillCluster(2, 1), Mooncake(threshold=1.2)
    system.begin(cluster, 0.0)
    request = call(128_000)
    system.stored("d0", "l2", None, request.keys[:1900].tobytes(), 0.0)
    for node in ("p0", "p1"):
        cluster[node].holds[request.id] = (0, 1600)
    assert placed(system.arrived(request, 0.0))[request.id].fetch == (), "1900 is not above 1.2 x 1600"
    system.prefilled(request, 1.0)
    for node in ("p0", "p1"):
        cluster[node].holds[request.id] = (0, 1500)
    assert placed(system.arrived(request, 0.0))[request.id].fetch != ()


def test_mooncake_decodes_where_tokens_come_fastest() -> None:
    cluster, system = StillCluster(1, 3), Mooncake()
    system.begin(cluster, 0.0)
    cluster["d0"].decodes(*[10_000] * 8)
    cluster["d1"].decodes(*[150_000] * 6)
    cluster["d2"].decodes(*[150_000] * 8)
    request = call()
    assert placed(system.arrived(request, 0.0))[request.id].decode == "d1"


def test_the_pool_behind_the_router_fetches_what_the_chosen_node_lacks() -> None:
    cluster, system = StillCluster(2, 1, draws=[0.9]), PoolLru()
    system.begin(cluster, 0.0)
    request = call(64_000)
    system.stored("d0", "l2", None, request.keys[:900].tobytes(), 0.0)
    system.stored("p1", "l2", None, request.keys[:300].tobytes(), 0.0)
    cluster["p1"].holds[request.id] = (0, 300)
    place = placed(system.arrived(request, 0.0))[request.id]
    assert place.prefill == "p1", "its own host blocks are credited besides the shared ones"
    assert place.fetch == (FetchSource(node="d0", first=300, last=900),)
