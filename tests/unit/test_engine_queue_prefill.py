"""Prefill legs in the queue: fetch, reservation, redirection, refusal, deadline."""

import pytest

from schemas.phase import Phase
from schemas.serve import Finish, RequestState
from services.engine.backend import LegKey
from services.engine.core import effects as fx
from tests.engine_world import World, request

P, D = "node-0", "node-1"


def test_both_legs_go_through_every_state_and_end() -> None:
    world = World(P, D)
    world.pair("q", P, D, prompt=16, fetch=(D,))
    world.settle()
    assert world.nodes[P].states(LegKey("q", 1, Phase.PREFILL)) == [
        RequestState.QUEUED,
        RequestState.FETCHING,
        RequestState.READY,
        RequestState.RESERVED,
        RequestState.PREFILLING,
        RequestState.TRANSFERRING,
    ]
    assert world.nodes[D].states(LegKey("q", 1, Phase.DECODE)) == [
        RequestState.QUEUED,
        RequestState.RESERVED,
        RequestState.DECODING,
    ]
    assert world.nodes[P].finishes("q") == [(1, Phase.PREFILL, Finish.HANDED_OFF)]
    assert world.nodes[D].finishes("q") == [(1, Phase.DECODE, Finish.STOP)]
    world.assert_empty()


def test_one_node_serves_both_legs_of_a_request() -> None:
    world = World(P, shared_pair=True)
    world.pair("q", P, P, prompt=60, new=4)
    world.settle()
    assert {finish for _, _, finish in world.nodes[P].finishes("q")} == {Finish.HANDED_OFF, Finish.STOP}
    world.assert_empty()


def test_a_pair_that_does_not_share_kv_must_fit_twice() -> None:
    world = World(P)
    reply = world.serve(P, request("q", Phase.DECODE, P, prompt=60, new=4))
    assert (reply.accepted, reply.reason) == (False, "context")
    assert "128 tokens of KV" in reply.text
    assert "96" in reply.text


def test_the_decode_node_is_asked_only_when_the_prefix_is_here() -> None:
    world = World(P, D)
    world.pair("q", P, D)
    world.tick()
    assert [kind for kind, _, _ in world.pending] == ["fetched"]
    world.deliver(0)
    world.tick()
    assert [kind for kind, _, _ in world.pending] == ["ask"]
    assert world.nodes[P].engine == {}
    world.deliver(0)
    assert set(world.nodes[P].engine) == {LegKey("q", 1, Phase.PREFILL)}
    assert set(world.nodes[D].engine) == {LegKey("q", 1, Phase.DECODE)}


def test_at_most_one_batch_more_than_runs_is_inside() -> None:
    world = World(P, D, l1_tokens=1000, max_running=16)
    for number in range(6):
        world.pair(f"q{number}", P, D, prompt=16)
    world.enter()
    world.tick()
    assert [key.id for key in world.nodes[P].engine] == ["q0", "q1"]
    assert world.pending == []


def test_device_room_is_given_in_queue_order() -> None:
    """The first waits for room; a small one behind it must not take what becomes free."""
    world = World(P, D, batch_tokens=64, max_running=8)
    for name, prompt in (("running", 60), ("large", 50), ("small", 8)):
        world.pair(name, P, D, prompt=prompt, new=1)
    while world.pending:
        world.deliver(0)
    world.step(P)
    assert [effect.key.id for _, _, effect in world.pending] == ["running"]


def test_serving_the_same_leg_again_changes_nothing() -> None:
    world = World(P, D)
    message = request("q", Phase.PREFILL, D, fetch=(D,))
    assert world.serve(P, message).accepted
    before = len(world.pending)
    again = world.serve(P, message)
    assert again.accepted
    assert again.position == 0
    assert len(world.pending) == before
    world.serve(D, request("q", Phase.DECODE, P))
    world.settle()
    assert world.serve(P, message).accepted, "an ended leg is known for a while"
    world.assert_empty()


def test_a_waiting_leg_is_redirected_and_the_old_grant_taken_back() -> None:
    world = World(P, D, "node-2")
    world.pair("q", P, D, room=1)
    world.deliver(0)
    world.tick()
    world.serve("node-2", request("q", Phase.DECODE, P, room=2))
    assert world.serve(P, request("q", Phase.PREFILL, "node-2", room=2)).accepted
    world.deliver(0)
    assert set(world.nodes[D].engine) == {LegKey("q", 1, Phase.DECODE)}, "the old one had granted"
    world.settle()
    assert world.nodes[D].finishes("q") == [(1, Phase.DECODE, Finish.CANCELLED)]
    assert world.nodes["node-2"].finishes("q") == [(1, Phase.DECODE, Finish.STOP)]
    world.assert_empty()


def test_a_leg_inside_cannot_be_redirected() -> None:
    world = World(P, D)
    world.pair("q", P, D)
    world.deliver(0)
    world.tick()
    world.deliver(0)
    reply = world.serve(P, request("q", Phase.PREFILL, "node-2", room=9))
    assert (reply.accepted, reply.reason) == (False, "late")
    assert D in reply.text


def test_a_grant_for_a_cancelled_leg_is_taken_back() -> None:
    world = World(P, D)
    world.pair("q", P, D)
    world.deliver(0)
    world.tick()
    world.cancel(P, "q", phase=Phase.PREFILL)
    world.deliver(0)
    assert list(world.nodes[D].engine) == [LegKey("q", 1, Phase.DECODE)]
    world.settle()
    world.assert_empty()


def test_a_grant_whose_answer_was_lost_is_taken_back_with_the_leg() -> None:
    world = World(P, D)
    world.pair("q", P, D)
    world.deliver(0)
    world.tick()
    world.deliver(0, lost=True)
    assert list(world.nodes[D].engine) == [LegKey("q", 1, Phase.DECODE)]
    world.command(P, Phase.DECODE, 1)
    world.settle()
    assert world.nodes[P].finishes("q") == [(1, Phase.PREFILL, Finish.REQUEUED)]
    world.assert_empty()


def test_a_grant_whose_answer_was_lost_is_given_again() -> None:
    world = World(P, D)
    world.pair("q", P, D)
    world.deliver(0)
    world.tick()
    world.deliver(0, lost=True)
    world.settle(0.2)
    assert world.nodes[D].finishes("q") == [(1, Phase.DECODE, Finish.STOP)]
    world.assert_empty()


def test_a_decode_node_that_does_not_know_the_leg_yet_is_asked_again() -> None:
    world = World(P, D)
    world.serve(P, request("q", Phase.PREFILL, D))
    world.settle(0.1)
    world.serve(D, request("q", Phase.DECODE, P))
    world.settle(0.3)
    assert world.nodes[D].finishes("q") == [(1, Phase.DECODE, Finish.STOP)]


def test_a_leg_whose_decode_node_never_knows_it_is_given_back() -> None:
    world = World(P, D)
    world.serve(P, request("q", Phase.PREFILL, D))
    world.settle(1.5)
    assert world.nodes[P].finishes("q") == [(1, Phase.PREFILL, Finish.REQUEUED)]
    assert world.nodes[P].reports[-1].reason == "peer node-1: unknown"


def test_a_leg_whose_decode_node_is_gone_is_given_back_at_once() -> None:
    world = World(P)
    world.serve(P, request("q", Phase.PREFILL, "node-9"))
    world.settle()
    assert world.nodes[P].finishes("q") == [(1, Phase.PREFILL, Finish.REQUEUED)]
    assert world.now < 0.2


def test_work_not_begun_by_its_deadline_is_given_back() -> None:
    world = World(P, D)
    world.nodes[D].alive = False
    world.serve(P, request("q", Phase.PREFILL, D, deadline_s=0.5))
    for _ in range(30):
        world.tick()
    assert world.nodes[P].reports[-1].reason == "deadline: not begun within 0.5 s"


def test_case_29_a_fetch_that_never_ends_is_given_up_for_recomputing() -> None:
    """16 planned tokens at 10 ms: after 0.16 s at the head the leg goes on with what is here."""
    world = World(P, D)
    world.frozen_fetches = True
    world.pair("q", P, D, prompt=17, fetch=(D,))
    [fetch_id] = world.nodes[P].pool
    world.settle(0.14)
    assert world.nodes[P].engine == {}
    world.settle(0.4)
    assert world.nodes[D].finishes("q") == [(1, Phase.DECODE, Finish.STOP)]
    assert world.nodes[P].given_up == 1
    late = world.nodes[P].core.fetched(fetch_id, 4)
    assert late == [fx.Release(fetch_id)], "late bytes are discarded"
    world.pair("next", P, D, prompt=17, fetch=(D,))
    assert len(world.nodes[P].pool) == 1, "the next fetch from the same peer is tried"


def test_a_fetch_is_not_given_up_while_the_engine_is_full_anyway() -> None:
    world = World(P, D, l1_tokens=1000)
    for name in ("a", "b"):
        world.pair(name, P, D, prompt=16)
    world.enter()
    world.frozen_fetches = True
    world.pair("c", P, D, prompt=17, fetch=(D,))
    for _ in range(100):
        world.tick()
    assert world.nodes[P].given_up == 0


@pytest.mark.parametrize("keys", [{"tokens": False}, {"tokens": True}])
def test_a_prompt_that_cannot_be_read_gives_the_leg_back(keys: dict[str, bool]) -> None:
    world = World(P, D)
    world.serve(P, request("q", Phase.PREFILL, D, **keys))
    world.deliver(0, lost=True)
    world.settle()
    expected = [] if keys["tokens"] else [(1, Phase.PREFILL, Finish.REQUEUED)]
    assert world.nodes[P].finishes("q")[: len(expected)] == expected


def test_refusals_name_the_value_and_the_limit() -> None:
    world = World(P, max_waiting=1)
    reply = world.serve(P, request("long", Phase.PREFILL, D, prompt=61, new=4))
    assert (reply.reason, "61 prompt + 4 new tokens" in reply.text, "64" in reply.text) == ("context", True, True)
    world.serve(P, request("a", Phase.PREFILL, D))
    reply = world.serve(P, request("b", Phase.PREFILL, D))
    assert (reply.reason, reply.text) == ("full", "1 legs wait, limit 1")
    world.command(P, Phase.DECODE, 3)
    reply = world.serve(P, request("c", Phase.PREFILL, D))
    assert (reply.reason, reply.epoch) == ("phase", 3)
    world.perform(P, world.nodes[P].core.drain(world.now))
    assert world.serve(P, request("d", Phase.DECODE, D)).reason == "draining"


def test_case_13_a_newer_attempt_ends_the_older_one_and_is_untouched_by_it() -> None:
    world = World(P, D)
    world.pair("q", P, D, attempt=1, room=11)
    world.deliver(0)
    world.tick()
    world.deliver(0)
    world.pair("q", P, D, attempt=2, room=22)
    assert world.nodes[P].core.table.find(LegKey("q", 2, Phase.PREFILL)) is not None
    world.settle()
    assert (1, Phase.DECODE, Finish.CANCELLED) in world.nodes[D].finishes("q")
    assert (2, Phase.DECODE, Finish.STOP) in world.nodes[D].finishes("q")
    reply = world.serve(P, request("q", Phase.PREFILL, D, attempt=1))
    assert reply.accepted, "it was here: nothing starts again"
    assert world.serve(P, request("q", Phase.PREFILL, "node-2", attempt=1, room=3)).accepted
    world.settle()
    world.assert_empty()


def test_a_cancel_that_overtakes_its_leg_refuses_it() -> None:
    world = World(P, D)
    assert world.cancel(P, "q") is False
    reply = world.serve(P, request("q", Phase.PREFILL, D))
    assert (reply.accepted, reply.reason) == (False, "cancelled")
    assert world.serve(P, request("q", Phase.PREFILL, D, attempt=2)).accepted
