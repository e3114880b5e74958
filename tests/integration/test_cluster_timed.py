"""A whole cluster on timed engines: every way KV reaches a request, switches, kills, and what is left behind."""

from tests.cluster import Answer, Cluster
from tests.scenario import Story, cold_local_fork_compact, engine_killed, peer_reuse, switch_under_load

UP = ("--engine", "timed", "--nodes", "3", "--set", "router.match_timeout_s=2")


async def reference(told: list[tuple[str, list[int], Answer]]) -> None:
    """Every answer is the one that a cluster of a single node gives to the same prompt."""
    async with Cluster.up("--engine", "timed", "--nodes", "1") as plain:
        for step, prompt, answer in told:
            alone = await plain.complete(prompt, len(answer.output))
            assert alone.output == answer.output, step


async def test_every_way_kv_reaches_a_request_gives_the_same_tokens() -> None:
    async with Cluster.up(*UP) as cluster:
        story = Story(cluster)
        await cold_local_fork_compact(story)
        await peer_reuse(story)
        await switch_under_load(story)
        await engine_killed(story, ready_s=15)
    await reference(story.told)
