"""Three symmetric SGLang engines in a whole cluster: greedy tokens equal one plain SGLang's, whichever way KV came."""

import pytest

from services.cli.demo.reference import reference_of
from tests.cluster import Cluster
from tests.scenario import Story, cold_local_fork_compact, engine_killed, equal_to, peer_reuse, switch_under_load

UP = ("--engine", "sglang", "--nodes", "3", "--set", "router.node_timeout_s=10")


@pytest.mark.e2e
@pytest.mark.timeout(900)
async def test_every_way_kv_reaches_a_request_gives_the_tokens_of_a_plain_engine() -> None:
    async with Cluster.up(*UP, ready_s=300) as cluster:
        story = Story(cluster)
        await cold_local_fork_compact(story)
        await peer_reuse(story)
        await switch_under_load(story, agents=3)
        await engine_killed(story, ready_s=240)
    await equal_to(reference_of("sglang"), story)
