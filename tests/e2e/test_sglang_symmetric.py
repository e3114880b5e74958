"""Two real SGLang engines on CPU, symmetric by the plug-in, against one unchanged engine: the contract of an upgrade.

Greedy float32 answers must be the same whichever way KV reaches a request. The engines start once for all tests.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from schemas.block_key import short_key, tenant_salt
from schemas.phase import Phase
from schemas.serve import Finish, RequestState, Sampling
from services.engine.sglang.plain import PlainAnswer, PlainEngine
from tests.e2e.sglang_needed import NEEDS_SGLANG
from tests.e2e.sglang_rig import SETTINGS, Node, digests, fetch, greedy, leftovers, pair, prompt, run, start_nodes

pytestmark = [NEEDS_SGLANG, pytest.mark.e2e, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="module")]

SHORT, LONG, TAIL = prompt(1, 90), prompt(2, 600), prompt(3, 40)
NEW = 24


async def _answers(engine: PlainEngine) -> dict[str, PlainAnswer]:
    """The answers of one engine to a short prompt, one of three chunks, and its continuation from the cache."""
    try:
        await engine.start()
        short = await engine.generate(SHORT, greedy(NEW))
        long = await engine.generate(LONG, greedy(NEW))
        next_turn = await engine.generate(LONG + long.tokens + TAIL, greedy(NEW))
        return {"short": short, "long": long, "next": next_turn}
    finally:
        await engine.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def references() -> tuple[dict[str, PlainAnswer], dict[str, PlainAnswer]]:
    """What a stock engine answers with our CPU attention, and with upstream's."""
    hooked, upstream = PlainEngine(SETTINGS), PlainEngine(SETTINGS, upstream_attention=True)
    first, second = await asyncio.gather(_answers(hooked), _answers(upstream))
    return first, second


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def nodes(references: object, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Node, Node]]:
    """Two nodes; they start when the reference engines have ended."""
    folder: Path = tmp_path_factory.mktemp("nodes")
    first, second = await start_nodes(folder, ["a", "b"])
    yield first, second
    await asyncio.gather(first.stop(), second.stop())
    assert leftovers(folder) == [], "the engines left files behind"


async def test_attention_over_new_rows_gives_upstreams_tokens(
    references: tuple[dict[str, PlainAnswer], dict[str, PlainAnswer]],
) -> None:
    hooked, upstream = references
    assert {name: answer.tokens for name, answer in hooked.items()} == {
        name: answer.tokens for name, answer in upstream.items()
    }
    cached = (len(LONG) + NEW - 1) // SETTINGS.block_size * SETTINGS.block_size
    assert hooked["next"].cached_tokens == upstream["next"].cached_tokens == cached


async def test_every_way_of_a_request_gives_the_plain_engines_tokens(
    nodes: tuple[Node, Node], references: tuple[dict[str, PlainAnswer], dict[str, PlainAnswer]]
) -> None:
    a, b = nodes
    plain = references[0]
    cold = await run("cold", a, b, SHORT, greedy(NEW))
    assert cold.answer == plain["short"].tokens

    chunked = await run("chunked", a, b, LONG, greedy(NEW))
    assert chunked.answer == plain["long"].tokens
    assert (await chunked.prefill_end()).cached_tokens == 0

    turned = await run("turned", b, a, LONG, greedy(NEW))
    assert turned.answer == plain["long"].tokens
    assert (await turned.prefill_end()).cached_tokens == 592, "the KV that b decoded on serves its prefill"

    following = LONG + plain["long"].tokens + TAIL
    for name, prefill, decode in (("next-b", b, a), ("next-a", a, b), ("alone", b, b)):
        turn = await run(name, prefill, decode, following, greedy(NEW))
        assert turn.answer == plain["next"].tokens
        assert (await turn.prefill_end()).cached_tokens >= plain["next"].cached_tokens


async def test_legs_go_through_their_states_in_order(nodes: tuple[Node, Node]) -> None:
    a, b = nodes
    legs = await run("states", a, b, prompt(10, 50), greedy(3))
    assert a.events.states[legs.key[0]] == [RequestState.PREFILLING, RequestState.TRANSFERRING]
    assert b.events.states[legs.key[1]] == [RequestState.DECODING]
    one_token = await run("one", a, b, prompt(11, 50), greedy(1))
    assert (await one_token.prefill_end()).finish is Finish.LENGTH
    assert len(one_token.answer) == 1


async def test_an_answer_may_end_with_its_first_token_and_sampling_is_passed_on(nodes: tuple[Node, Node]) -> None:
    a, b = nodes
    tokens = prompt(60, 50)
    first = (await run("greedy", a, b, tokens, greedy(2))).answer[0]
    stops = msgspec.structs.replace(greedy(9), stop_token_ids=[first])
    stopped = pair("stopped", a, b, tokens, stops)
    stopped.submit()
    assert (await stopped.prefill_end()).finish is Finish.STOP
    assert (await stopped.decode_end()).finish is Finish.STOP
    assert stopped.answer == [first]
    sampled = Sampling(
        max_new_tokens=6, temperature=0.9, top_p=0.9, top_k=40, min_p=0.01, seed=3, ignore_eos=True,
        frequency_penalty=0.1, presence_penalty=0.1, repetition_penalty=1.1,
    )  # fmt: skip
    assert len((await run("sampled", a, b, tokens, sampled)).answer) == 6
    at_least = msgspec.structs.replace(stops, max_new_tokens=6, ignore_eos=False, min_new_tokens=4)
    longer = pair("at-least", a, b, tokens, at_least)
    longer.submit()
    await longer.prefill_end()
    await longer.decode_end()
    assert first not in longer.answer[:4], "a stop token cannot come before the shortest answer"
    assert len(longer.answer) >= 4


async def test_a_leg_that_sglang_refuses_ends_with_the_reason(nodes: tuple[Node, Node]) -> None:
    a, b = nodes
    legs = pair("too-long", a, b, prompt(61, SETTINGS.context_tokens + 5), greedy(4))
    legs.submit()
    for end in (await legs.prefill_end(), await legs.decode_end()):
        assert end.finish is Finish.ERROR
        assert str(SETTINGS.context_tokens) in end.reason
    assert a.backend.room(Phase.PREFILL) == a.backend.info.l1_tokens - SETTINGS.block_size


async def test_telemetry_adds_up_to_what_the_requests_were(nodes: tuple[Node, Node]) -> None:
    a, b = nodes
    seen = {node.name: len(node.events.iterations) for node in nodes}
    tokens = prompt(12, 300)
    first = await run("measured", a, b, tokens, greedy(5))
    second = await run("measured-again", a, b, tokens + prompt(13, 30), greedy(5))
    cached = [(await legs.prefill_end()).cached_tokens for legs in (first, second)]
    assert cached == [0, 288]

    prefills = [i for i in a.events.iterations[seen["a"] :] if i.phase is Phase.PREFILL]
    assert sum(i.uncached_tokens for i in prefills) == 300 + (330 - 288)
    assert sum(i.cached_tokens for i in prefills) == 288
    assert sum(i.output_tokens for i in prefills) == 2
    pairs = 300 * 301 / 2 + (42 * 288 + 42 * 43 / 2)
    assert sum(i.attention_pairs for i in prefills) == pairs
    decodes = [i for i in b.events.iterations[seen["b"] :] if i.phase is Phase.DECODE]
    assert sum(i.output_tokens for i in decodes) == sum(i.fed_tokens for i in decodes) == 2 * 4
    assert decodes[0].context_tokens == 301
    assert all(i.duration_s > 0 for i in prefills + decodes)


async def test_device_blocks_carry_our_keys_with_and_without_a_tenant(nodes: tuple[Node, Node]) -> None:
    a, b = nodes
    tokens = prompt(14, 100)
    salt = tenant_salt("acme")
    plain, salted = (
        await run("keys", a, b, tokens, greedy(20)),
        await run("salted", a, b, tokens, greedy(20), salt=salt),
    )
    assert plain.answer == salted.answer
    assert (await salted.prefill_end()).cached_tokens == 0, "tenants share no blocks"
    for legs, its_salt in ((plain, None), (salted, salt)):
        blocks = digests(tokens + legs.answer[:-1], its_salt)
        assert len(blocks) == 7
        assert {short_key(digest) for digest in blocks} <= b.events.device
        assert {short_key(digest) for digest in blocks[:6]} <= a.events.device


async def test_a_decode_engine_writes_its_output_only(nodes: tuple[Node, Node]) -> None:
    a, b = nodes
    tokens = prompt(15, 100)
    legs = await run("written", a, b, tokens, greedy(40))
    await asyncio.gather(a.settled(), b.settled())
    blocks = digests(tokens + legs.answer[:-1])
    assert await a.locate(blocks) == [True] * 6 + [False] * 2
    assert await b.locate(blocks) == [False] * 6 + [True] * 2, "block 6 ends with an output token"


async def test_a_prefix_from_a_peers_pool_is_restored_before_the_prefill(nodes: tuple[Node, Node]) -> None:
    a, b = nodes
    tokens = prompt(16, 330)
    first = await run("computed", a, a, tokens, greedy(30))
    await a.settled()
    following = tokens + first.answer
    assert await fetch(b, a, digests(following[:-1])) == 22
    seen = len(b.events.iterations)
    again = await run("restored", b, a, following, greedy(8))
    end = await again.prefill_end()
    assert (end.cached_tokens, end.restored_tokens) == (352, 352)
    prefill = next(i for i in b.events.iterations[seen:] if i.phase is Phase.PREFILL)
    assert (prefill.uncached_tokens, prefill.restored_tokens) == (8, 352)
    here = await run("recomputed", a, b, following, greedy(8))
    assert again.answer == here.answer


async def test_cancelled_legs_leave_nothing_in_any_state(nodes: tuple[Node, Node]) -> None:
    a, b = nodes
    waits_for_peer = pair("no-decode", a, b, prompt(20, 60), greedy(4))
    waits_for_peer.submit_prefill()
    waits_for_kv = pair("no-prefill", a, b, prompt(21, 60), greedy(4))
    waits_for_kv.submit_decode()
    in_chunks = pair("chunks", b, a, prompt(22, 900), greedy(4))
    in_chunks.submit()
    await asyncio.wait_for(b.events.reaches(in_chunks.key[0], RequestState.PREFILLING).wait(), 60)
    decoding = pair("decoding", a, b, prompt(23, 60), greedy(500))
    decoding.submit()
    await asyncio.wait_for(b.events.reaches(decoding.key[1], RequestState.DECODING).wait(), 60)
    at_once = pair("at-once", a, b, prompt(24, 60), greedy(4))
    at_once.submit()

    for legs in (waits_for_peer, waits_for_kv, in_chunks, decoding, at_once):
        legs.prefill.backend.cancel(legs.key[0])
        legs.decode.backend.cancel(legs.key[1])
    assert (await waits_for_peer.prefill_end()).finish is Finish.CANCELLED
    assert (await waits_for_kv.decode_end()).finish is Finish.CANCELLED
    for legs in (in_chunks, decoding, at_once):
        assert (await legs.decode_end()).finish is Finish.CANCELLED
        assert (await legs.prefill_end()).finish in (Finish.CANCELLED, Finish.HANDED_OFF)
    assert len(decoding.answer) < 500
    await asyncio.gather(a.settled(), b.settled())
    for node in nodes:
        node.assert_nothing_leaked()
    assert len((await run("after", a, b, prompt(20, 60), greedy(4))).answer) == 4


async def test_after_a_switch_decode_blocks_leave_the_device_and_stay_in_the_pool(nodes: tuple[Node, Node]) -> None:
    a, b = nodes
    decoded, prefilled = prompt(30, 200), prompt(31, 200)
    legs = await run("decoded", a, b, decoded, greedy(20))
    await run("prefilled", b, a, prefilled, greedy(4))
    await b.settled()
    assert {short_key(digest) for digest in digests(decoded)} <= b.events.device
    b.backend.drop_decode_cache()
    await b.settled()
    blocks = digests(decoded + legs.answer[:-1])
    assert not {short_key(digest) for digest in blocks} & b.events.device
    assert {short_key(digest) for digest in digests(prefilled)} <= b.events.device
    assert all(await b.locate(blocks)), "what no arena of the node held was written before it went"
    b.assert_nothing_leaked()


async def test_case_3_a_decode_leg_whose_peer_was_killed_gives_its_pages_back(nodes: tuple[Node, Node]) -> None:
    a, b = nodes
    legs = pair("orphan", a, b, prompt(40, 1500), greedy(4))
    legs.submit()
    await asyncio.wait_for(a.events.reaches(legs.key[0], RequestState.PREFILLING).wait(), 60)
    assert a.backend.pid is not None
    os.kill(a.backend.pid, signal.SIGKILL)
    assert await asyncio.wait_for(a.events.failure, 30)
    end = await legs.decode_end()
    assert end.finish is Finish.ERROR
    await b.settled()
    b.assert_nothing_leaked()
    assert len((await run("survivor", b, b, prompt(41, 60), greedy(4))).answer) == 4
