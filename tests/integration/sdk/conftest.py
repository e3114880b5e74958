"""One `ei up` with a script of replies, for the tests of the official SDKs."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.cluster import Cluster

SCRIPT = """
[[reply]]
pattern = "weather in Paris and Rome"
text = "Let me look."
calls = [
    { name = "get_weather", arguments = { city = "Paris", days = 2 } },
    { name = "get_weather", arguments = { city = "Rome" } },
]

[[reply]]
pattern = "<tool_response>\\\\s*18 degrees"
text = "It is 18 degrees in Paris."

[[reply]]
pattern = "patch the file"
calls = [{ name = "apply_patch", arguments = { input = "*** Begin" } }]

[[reply]]
pattern = "spawn a helper"
calls = [{ name = "spawn_agent", arguments = { message = "say hi" } }]

[[reply]]
pattern = "count to five"
text = "one two three four five"

[[reply]]
pattern = "hello"
text = "Good day, Zoë."
"""


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def scripted(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """Two timed nodes that play the script without taking time."""
    script = tmp_path_factory.mktemp("script") / "script.toml"
    script.write_text(SCRIPT)
    options = ["--engine", "timed", "--nodes", "2", "--script", str(script), "--set", "engine.timed.preset=zero"]
    async with Cluster.up(*options) as cluster:
        yield cluster
