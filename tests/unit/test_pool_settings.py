"""Mistakes in a pool's settings are named with value and limit."""

from typing import Any

import pytest

from services.kvpool.settings import KvPoolSettings


def made(**fields: Any) -> KvPoolSettings:
    given: dict[str, Any] = {"model": "tiny", "capacity_blocks": 4}
    return KvPoolSettings(**given | fields)


def test_paths_and_name_follow_cluster_and_node() -> None:
    of = made(cluster="x", node="node-3")
    assert str(of.arena_path) == "/dev/shm/ei-x-node-3.arena"
    assert of.socket_path.name == "ei-x-node-3.sock"
    assert of.name == "kvpool-node-3"


def test_capacity_in_bytes_counts_whole_blocks() -> None:
    assert made(capacity_blocks=0, capacity_bytes=10_000, block_bytes=3_000).slots == 3


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"node": "Node 1"}, r"`node` 'Node 1' does not match"),
        ({"model": ""}, "`model` is empty"),
        ({"key_version": "md5"}, "`key_version` 'md5' is neither"),
        ({"capacity_blocks": 0}, "`capacity_blocks` or `capacity_bytes`, one of them"),
        ({"capacity_bytes": 1}, "`capacity_blocks` or `capacity_bytes`, one of them"),
        (
            {"capacity_blocks": 0, "capacity_bytes": 7, "block_bytes": 8},
            "`capacity_bytes` 7 is less than one block of 8",
        ),
        ({"socket": "/tmp/" + "x" * 110}, "has 115 bytes, at most 107 fit"),
    ],
)
def test_mistakes_are_named(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        made(**fields)
