"""Branches through the router with a real directory: identity, lineage, events, claims."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from schemas.branch import BranchEvent, BranchEventType, decode_branch_event
from schemas.subjects import Subjects
from services.bus import Delivery
from services.directory.service import DirectoryService
from services.directory.settings import DirectorySettings
from tests.engine_cluster import service, until
from tests.router_stage import Connect, Stage, in_memory, stage

PROMPT = list(range(65, 105))
S = Subjects()


class Heard:
    """Every branch event that reached the stream."""

    def __init__(self) -> None:
        self.events: list[BranchEvent] = []

    async def hear(self, delivery: Delivery) -> None:
        self.events.append(decode_branch_event(delivery.data, delivery.headers, delivery.subject))

    def of(self, kind: BranchEventType) -> list[BranchEvent]:
        return [event for event in self.events if event.type is kind]


@asynccontextmanager
async def known(connect: Connect, path: Path, **settings: Any) -> AsyncIterator[tuple[Stage, Heard]]:
    """A router, a node and a directory, and what is stored about branches."""
    directory = DirectorySettings(state_dir=str(path), log_level="error")
    async with (
        service(DirectoryService, directory, await connect()),
        stage(connect, "n1", match_timeout_s=1.0, **settings) as s,
    ):
        heard = Heard()
        await s.router.app.bus.follow(S.branch_events(), heard.hear, start="all")
        yield s, heard
        await s.settled()


@pytest.fixture
def memory() -> Connect:
    return in_memory()


async def test_answer_becomes_the_branchs_context(memory: Connect, tmp_path: Path) -> None:
    async with known(memory, tmp_path) as (s, heard):
        reply = await s.complete(PROMPT, 9, branch="b")
        await until(lambda: bool(heard.of(BranchEventType.CONTEXT)))
        (event,) = heard.of(BranchEventType.CONTEXT)
        assert (event.branch, event.blocks, event.prompt_blocks, event.base_blocks) == ("b", 12, 10, 0)
        assert (event.prefill_node, event.decode_node) == ("n1", "n1")
        assert len(event.keys) == 12 * 8
        shown = (await s.get("/v1/branches/b")).body
        assert (shown["id"], shown["state"], shown["kind"], shown["version"]) == ("b", "active", "main", 0)
        await s.complete(PROMPT + reply.tokens + [7] * 9, 3, branch="b")
        await until(lambda: len(heard.of(BranchEventType.CONTEXT)) == 2)
        second = heard.of(BranchEventType.CONTEXT)[1]
        assert (second.base_blocks, second.blocks) == (12, 15)
        assert len(second.keys) == 3 * 8


async def test_requests_that_ended_say_why_their_tokens_were_computed(memory: Connect, tmp_path: Path) -> None:
    async with known(memory, tmp_path) as (s, _):
        await s.complete(PROMPT, 9, branch="b")
        await s.settled()
        other = [7, *PROMPT[1:]]
        await s.post("/v1/completions", {"prompt": other, "max_tokens": 2}, x_ei_branch_id="b", x_request_id="mine")
        await s.settled()
        found = await s.get("/v1/requests/mine")
        assert found.status == 200
        assert found.body["lineage"] == "transient"
        assert found.body["differs_at"] == 0
        assert sum(found.body["misses"].values()) == found.body["uncached_tokens"] == 40
        assert found.body["misses"]["diverged"] == 36
        listed = await s.get("/v1/requests?branch=b")
        assert [each["branch"] for each in listed.body["requests"]] == ["b", "b"]
        assert (await s.get("/v1/requests/nobody")).status == 404
        assert (await s.get("/v1/requests")).status == 400


async def test_cancelled_request_claims_nothing(memory: Connect, tmp_path: Path) -> None:
    async with known(memory, tmp_path) as (s, heard):
        await s.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 3, "n": 2}, x_ei_branch_id="b")
        refused = await s.complete(PROMPT, 3000, branch="b")
        assert refused.status == 400
        assert heard.events == []


async def test_end_with_the_last_answer(memory: Connect, tmp_path: Path) -> None:
    async with known(memory, tmp_path) as (s, heard):
        body = {"prompt": PROMPT, "max_tokens": 5, "branch": {"id": "b", "end": True}}
        assert (await s.post("/v1/completions", body)).status == 200
        await until(lambda: bool(heard.of(BranchEventType.END)))
        assert [event.type for event in heard.events] == [BranchEventType.CONTEXT, BranchEventType.END]
        assert (await s.get("/v1/branches/b")).body["state"] == "ended"


async def test_events_by_http(memory: Connect, tmp_path: Path) -> None:
    async with known(memory, tmp_path) as (s, heard):
        opened = await s.post("/v1/branches/a/events", {"type": "open", "event_id": "e1"})
        assert (opened.status, opened.body) == (202, {"event_id": "e1", "branch": "a", "type": "open"})
        again = await s.post("/v1/branches/a/events", {"type": "open", "event_id": "e1"})
        assert again.status == 202
        await until(lambda: len(heard.events) == 1)
        forked = await s.post("/v1/branches/c/events", {"type": "fork", "parent": "a"})
        assert forked.status == 202
        unknown = await s.post("/v1/branches/c/events", {"type": "fork", "parent": "nobody"})
        assert (unknown.status, unknown.error["param"]) == (400, "parent")
        assert (await s.get("/v1/branches/a", "DELETE")).status == 202
        await until(lambda: len(heard.events) == 3)
        listed = {branch["id"]: branch for branch in (await s.get("/v1/branches")).body["branches"]}
        assert (listed["a"]["state"], listed["c"]["parent"], listed["c"]["kind"]) == ("ended", "a", "fork")
        assert (await s.get("/v1/branches/none")).status == 404
        assert (await s.get("/v1/branches/none", "DELETE")).error["code"] == "branch_not_found"
        for limit in ("x", "0", "9" * 5000):
            assert (await s.get(f"/v1/branches?limit={limit}")).status == 400


async def test_unknown_parent_is_refused(memory: Connect, tmp_path: Path) -> None:
    async with known(memory, tmp_path) as (s, _):
        child = {"id": "c", "parent": "p", "kind": "subagent"}
        body = {"prompt": PROMPT, "max_tokens": 3, "branch": child}
        refused = await s.post("/v1/completions", body)
        assert (refused.status, refused.error["param"]) == (400, "branch.parent")
        await s.complete(PROMPT, 3, branch="p")
        assert (await s.post("/v1/completions", body)).status == 200


async def test_branch_of_a_tenant_is_its_own(memory: Connect, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\nkey = "a"\ntenant = "acme"\n[[keys]]\nkey = "z"\ntenant = "zeta"\n')
    async with known(memory, tmp_path, keys_file=str(keys)) as (s, heard):
        body = {"prompt": PROMPT, "max_tokens": 3, "branch": {"id": "b"}, "ignore_eos": True}
        assert (await s.post("/v1/completions", body, authorization="Bearer a")).usage["prompt_tokens"] == 40
        other = await s.post("/v1/completions", body, authorization="Bearer z")
        assert other.usage["prompt_tokens_details"]["cached_tokens"] == 0
        again = await s.post("/v1/completions", body, authorization="Bearer a")
        assert again.usage["prompt_tokens_details"]["cached_tokens"] == 36
        await until(lambda: len(heard.of(BranchEventType.CONTEXT)) == 3)
        assert {event.tenant for event in heard.events} == {"acme", "zeta"}
        shown = await s.get("/v1/branches", authorization="Bearer z")
        assert [branch["id"] for branch in shown.body["branches"]] == ["b"]
