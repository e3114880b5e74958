"""The router's HTTP against real timed engines: answers, streams, usage, headers."""

import asyncio
from typing import Any

import pytest

from tests.engine_cluster import until
from tests.router_stage import Connect, stage

PROMPT = list(range(65, 105))


async def test_completion_of_token_ids(connect: Connect) -> None:
    async with stage(connect, "n0") as s:
        reply = await s.complete(PROMPT, 5)
        assert reply.status == 200, reply.body
        assert len(reply.tokens) == 5
        assert reply.finish == "length"
        assert reply.body["object"] == "text_completion"
        await s.settled()
