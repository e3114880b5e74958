"""KV that outlives its request: on the device, in the own pool, at a peer; wrong, late and lost blocks."""

import asyncio
from pathlib import Path

from schemas.block_key import block_digests, full_blocks, token_bytes
from schemas.codec import encode
from schemas.phase import Phase
from schemas.serve import (
    PROMPT_REQUEST,
    REPLY_BATCH,
    FetchSource,
    Finish,
    PromptPart,
    ResendRequest,
    Sampling,
    ServeRequest,
)
from services.bus import Delivery
from services.engine.core.timing import Coefficients
from tests.engine_cluster import ROUTER, Cluster, Connect, S, cluster, prompt_of, timed, until

A, B, C = "node-0", "node-1", "node-2"
BLOCK = 4


def written(c: Cluster, source: FetchSource, prompt: list[int]) -> bool:
    """Whether the pool of this node has all blocks that it is said to have."""
    pool = c.engines[source.node].engine._pool
    assert pool is not None
    assert pool.reader is not None
    digests = block_digests(token_bytes(prompt), BLOCK)[source.first : source.last]
    return len(pool.reader.lookup(b"".join(digests))) == len(digests)


async def test_the_next_turn_reuses_prompt_and_answer_from_two_nodes(connect: Connect, tmp_path: Path) -> None:
    """A prefilled, B decoded; C fetches the prompt from A and the answer from B, and computes only what is new."""
    async with cluster(connect, tmp_path) as c:
        for node in (A, B, C):
            await c.engine(node, pool=True, make=timed(times=Coefficients(c1=1.0)))
        first = prompt_of(1, 41)
        await c.router.place("one", A, B, first, 22)
        answer = await c.router.answer("one")
        prompt = first + answer + prompt_of(2, 5)
        have, all_blocks = full_blocks(len(first), BLOCK), full_blocks(len(first) + len(answer) - 1, BLOCK)
        sources = [FetchSource(node=A, first=0, last=have), FetchSource(node=B, first=have, last=all_blocks)]
        for source in sources:
            await until(lambda s=source: written(c, s, prompt))
        await c.router.place("two", C, B, prompt, 4, fetch=sources)
        assert await c.router.answer("two")
        await c.router.prefill("two").ended.wait()
        end = c.router.prefill("two").end
        assert end is not None
        assert (end.cached_tokens, end.restored_tokens) == (all_blocks * BLOCK, all_blocks * BLOCK)
        await c.router.place("again", A, B, prompt, 4)
        assert await c.router.answer("again") == c.router.decode("two").tokens
        await c.assert_as_before()


async def test_device_memory_is_used_before_host_memory(connect: Connect, tmp_path: Path) -> None:
    async with cluster(connect, tmp_path) as c:
        await c.engine(A, pool=True)
        prompt = prompt_of(1, 40)
        for name, cached in (("cold", 0), ("warm", 36)):
            await c.router.place(name, A, A, prompt, 4)
            await c.router.answer(name)
            await c.router.prefill(name).ended.wait()
            end = c.router.prefill(name).end
            assert end is not None
            assert (end.cached_tokens, end.restored_tokens) == (cached, 0), "the last prompt token is always computed"


async def test_a_wrong_block_fails_the_request_loudly_and_frees_the_decode_node(
    connect: Connect, tmp_path: Path
) -> None:
    """Also case 7: the decode leg of a failed prefill is over within a second, its memory free."""
    async with cluster(connect, tmp_path) as c:
        for node in (A, B):
            await c.engine(node, pool=True, l1_tokens=64, max_context_tokens=64)
        prompt = prompt_of(1, 41)
        await c.router.place("good", A, B, prompt, 4)
        await c.router.place("evicts", A, B, prompt_of(2, 60), 4)
        for name in ("good", "evicts"):
            await c.router.answer(name)
            await c.router.prefill(name).ended.wait()
        pool = c.engines[A].engine._pool
        assert pool is not None
        assert pool.reader is not None
        for slot in range(pool.reader.layout.slots):
            pool.reader.view(slot)[:8] = 0xFF
        await c.router.place("bad", A, B, prompt, 4)
        await asyncio.wait_for(c.router.prefill("bad").ended.wait(), 1.0)
        end = c.router.prefill("bad").end
        assert end is not None
        assert end.finish is Finish.ERROR
        assert "does not hold the bytes of block" in end.reason
        assert c.engines[A].backend.wrong_blocks == 1
        await asyncio.wait_for(c.router.decode("bad").ended.wait(), 1.0)
        assert c.router.decode("bad").finish is Finish.CANCELLED
        await c.assert_as_before()


async def test_case_29_a_stuck_fetch_costs_no_more_than_recomputing(connect: Connect, tmp_path: Path) -> None:
    """The missing part would take 0.4 s to compute: so long the fetch may take, then it is computed."""

    async def never(_: Delivery) -> bytes:
        await asyncio.Event().wait()
        return b""

    async def prefill(_: float) -> None:
        await asyncio.sleep(0.1)

    async with cluster(connect, tmp_path) as c:
        await c.engine(A, pool=True, make=timed(prefill, times=Coefficients(c1=0.01)))
        await c.router.bus.respond(S.pool("lease", "node-9"), never)
        sources = [FetchSource(node="node-9", first=0, last=10)]
        for name in ("first", "second"):
            await c.router.place(name, A, A, prompt_of(len(name), 41), 1, fetch=sources)
            took_s = await until(lambda n=name: len(c.router.prefill(n).tokens) == 1)
            assert 0.4 <= took_s < 1.2, "the fetch was tried, and given up in time"
        metric = c.engines[A].engine._metrics.fetch_deadline
        assert metric._value.get() == 2
        await c.assert_as_before()


async def test_case_5_aborted_reads_of_host_memory_leave_no_pin(connect: Connect, tmp_path: Path) -> None:
    async with cluster(connect, tmp_path) as c:
        await c.engine(A, pool=True)
        prompt = prompt_of(1, 17)
        await c.router.place("seed", A, A, prompt, 1)
        await c.router.answer("seed")
        for cycle in range(30):
            await c.router.place(f"q{cycle}", A, A, prompt, 50)
            await c.router.cancel(A, f"q{cycle}")
        await c.assert_as_before()


async def test_requests_are_served_while_the_pool_is_away(connect: Connect, tmp_path: Path) -> None:
    async with cluster(connect, tmp_path) as c:
        await c.engine(A, pool=True)
        await c.router.place("before", A, A, prompt_of(1, 41), 4)
        await c.router.answer("before")
        pool = c.engines[A].engine._pool
        assert pool is not None
        c.pools[A].stop.set()
        await c.pools[A].task
        await until(lambda: not pool.attached)
        assert c.engines[A].engine.not_ready() == [], "it serves on without"
        await c.router.place("without", A, A, prompt_of(2, 41), 4)
        assert len(await c.router.answer("without")) == 4
        await c.pool(A, tmp_path / f"{A}.sock")
        await until(lambda: pool.attached)
        held = c.engines[A].backend.memory.device._blocks
        log = c.pools[A].service._local.store.core.log
        await until(lambda: len(log.l1) == len(held))
        await c.router.place("after", A, A, prompt_of(3, 41), 4)
        assert len(await c.router.answer("after")) == 4


async def test_a_prompt_too_large_for_one_message_is_read_in_parts(connect: Connect, tmp_path: Path) -> None:
    """Case 43: read from the router in parts, by both legs."""
    prompt = prompt_of(1, 1_000)
    asked: list[int] = []

    async def part(delivery: Delivery) -> bytes:
        question = PROMPT_REQUEST.decode(delivery.data)
        asked.append(question.first)
        last = min(question.first + min(question.count, 300), len(prompt))
        return encode(PromptPart(known=True, tokens=token_bytes(prompt[question.first : last])))

    async with cluster(connect, tmp_path) as c:
        for node in (A, B):
            await c.engine(node)
        await c.router.bus.respond(S.prompt(ROUTER), part)
        for node, phase, peer in ((B, Phase.DECODE, A), (A, Phase.PREFILL, B)):
            message = ServeRequest(
                id="q",
                attempt=1,
                phase=phase,
                router=ROUTER,
                peer=peer,
                room=1,
                prompt_tokens=len(prompt),
                sampling=Sampling(max_new_tokens=6),
            )
            assert (await c.router.serve(node, message)).accepted
        answer = await c.router.answer("q")
        assert sorted(asked) == [0, 0, 300, 300, 600, 600, 900, 900]
        await c.router.place("inline", A, B, prompt, 6)
        assert await c.router.answer("inline") == answer


async def test_a_router_that_missed_tokens_gets_them_again(connect: Connect, tmp_path: Path) -> None:
    async with cluster(connect, tmp_path) as c:
        for node in (A, B):
            await c.engine(node)
        await c.router.place("q", A, B, prompt_of(1, 20), 30)
        answer = await c.router.answer("q")

        async def resend(name: str, seq: int) -> list[object]:
            question = ResendRequest(id=name, attempt=1, phase=Phase.DECODE, seq=seq)
            return REPLY_BATCH.decode(await c.router.bus.request(S.resend(B), encode(question), 1.0)).updates

        [update] = await resend("q", 11)
        assert (update.seq, update.tokens, update.finish) == (11, token_bytes(answer[11:]), Finish.LENGTH)
        assert await resend("stranger", 0) == []
