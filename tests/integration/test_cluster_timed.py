"""A whole cluster on timed engines: every way KV reaches a request, switches, kills, and what is left behind."""

import pytest

from services.cli.demo.reference import reference_of
from tests.cluster import Cluster
from tests.scenario import Story, cold_local_fork_compact, engine_killed, equal_to, peer_reuse, switch_under_load

UP = ("--engine", "timed", "--nodes", "3")


@pytest.mark.timeout(300)
async def test_every_way_kv_reaches_a_request_gives_the_same_tokens() -> None:
    async with Cluster.up(*UP) as cluster:
        story = Story(cluster)
        await cold_local_fork_compact(story)
        await peer_reuse(story)
        await switch_under_load(story)
        await engine_killed(story, ready_s=60)
    await equal_to(reference_of("timed"), story)
