"""What harnesses send unmodified, through a router and a real directory: the traps, and the tree that comes of them."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from services.router.core.identity_volatile import ATTRIBUTION
from tests.engine_cluster import until
from tests.integration.test_router_branches import known
from tests.router_stage import Connect, Reply, Stage, in_memory

SESSION = "x_claude_code_session_id"
RULES = "You help with many things. " * 8


@pytest.fixture
def memory() -> Connect:
    return in_memory()


async def say(s: Stage, messages: list[str], number: int = 0, **headers: str) -> Reply:
    """One call as Claude Code makes it, its attribution block different each time."""
    body = {
        "model": "",
        "max_tokens": 4,
        "system": [
            {"type": "text", "text": f"{ATTRIBUTION} cc_version=2.1.332.{number:03x}; cc_entrypoint=cli;"},
            {"type": "text", "text": RULES},
        ],
        "messages": [{"role": "user" if i % 2 == 0 else "assistant", "content": t} for i, t in enumerate(messages)],
    }
    return await s.post("/v1/messages", body, **headers)


async def branches(s: Stage) -> list[tuple[str, str | None, str, int]]:
    found = (await s.get("/v1/branches")).body["branches"]
    return sorted((b["id"], b["parent"], b["kind"], b["version"]) for b in found)


async def contexts(heard: Any, count: int) -> None:
    await until(lambda: len([event for event in heard.events if event.type == "context"]) >= count)


@pytest.mark.parametrize("filtered", [True, False])
async def test_a_changing_attribution_block_costs_nothing_or_is_reported_with_its_place(
    memory: Connect, tmp_path: Path, filtered: bool
) -> None:
    settings: dict[str, Any] = {} if filtered else {"volatile_prefixes": []}
    async with known(memory, tmp_path, **settings) as (s, heard):
        cached, prompts = [], []
        for number in range(3):
            usage = (await say(s, ["hello"], number + 0xA00, x_litellm_session_id="f")).usage
            cached.append(usage["cache_read_input_tokens"])
            prompts.append(usage["input_tokens"] + usage["cache_read_input_tokens"])
            await contexts(heard, number + 1)
        found = (await s.get("/v1/prompt_breaks")).body["breaks"]
        if filtered:
            assert cached[1:] == [(prompts[0] - 1) // 4 * 4] * 2
            assert found == []
            return
        (broken,) = found
        head = f"{ATTRIBUTION} cc_version=2.1.332.a0"
        assert max(cached) <= broken["position"] < prompts[0] - len(RULES)
        assert broken["position"] >= len(head)
        assert (broken["branch"], broken["before"], broken["now"]) == ("f", "1", "2")


async def test_side_requests_share_the_id_and_change_nothing(memory: Connect, tmp_path: Path) -> None:
    async with known(memory, tmp_path) as (s, heard):
        side = {SESSION: "s", "x_ei_branch_kind": "transient"}
        for turn, (messages, headers) in enumerate(
            [
                (["title of this, please, in a few words"], {}),
                (["hello " * 20], {"x_ei_branch_id": "s"}),
                (["title of this, please"], {"x_ei_branch_id": "s"} | side),
                (["hello " * 20, "answer", "go on " * 9], {"x_ei_branch_id": "s"}),
                (["what is this about?"], {}),
            ]
        ):
            assert (await say(s, messages, **{SESSION: "s"} | headers)).status == 200
            await contexts(heard, turn + 1)
        assert await branches(s) == [("s", None, "main", 0)]


@pytest.mark.parametrize("deleted", [False, True])
async def test_a_family_id_is_shared_and_its_branches_are_told_apart(
    memory: Connect, tmp_path: Path, deleted: bool
) -> None:
    async with known(memory, tmp_path) as (s, heard):
        main, child = ["the main task " * 5], ["another task for a child " * 5]
        for turn, messages in enumerate([main, child, [*main, "ok", "go on " * 9], [*child, "ok", "and on " * 9]]):
            assert (await say(s, messages, x_litellm_session_id="conversation")).status == 200
            await contexts(heard, turn + 1)
        found = await branches(s)
        assert [(name.partition("/")[0], kind, version) for name, _, kind, version in found] == [
            ("conversation", "main", 0),
            ("conversation", "main", 0),
        ]
        if deleted:
            assert (await s.get("/v1/branches/conversation", "DELETE")).status == 202
            assert (await s.get("/v1/branches/convers", "DELETE")).status == 404
        else:
            await s.post("/v1/branches/conversation/events", {"type": "end"})
        async with asyncio.timeout(5):
            while {b["state"] for b in (await s.get("/v1/branches")).body["branches"]} != {"ended"}:
                await asyncio.sleep(0.02)


async def test_codexs_windows_are_versions(memory: Connect, tmp_path: Path) -> None:
    async with known(memory, tmp_path) as (s, heard):
        for turn, (window, parent) in enumerate([("t:0", ""), ("c:0", "t"), ("t:1", ""), ("t:1", "")]):
            headers = {"x_codex_window_id": window, "thread_id": window[0], "session_id": "t"}
            headers |= {"x_codex_parent_thread_id": parent} if parent else {}
            assert (
                await say(s, [f"window {window} " * 9, *["more " * 9] * (2 * (turn == 3))], **headers)
            ).status == 200
            await contexts(heard, turn + 1)
        assert await branches(s) == [("c", "t", "subagent", 0), ("t", None, "main", 1)]
