"""Decode legs in the queue: held, granted in fair order, started once, released with their prefill."""

from schemas.phase import Phase
from schemas.serve import Finish, Handoff, HandoffVerb
from services.engine.backend import LegKey
from tests.engine_world import World, request

P, P2, D = "node-0", "node-1", "node-2"


def message(verb: HandoffVerb, name: str, *, node: str = P, attempt: int = 1, room: int = 1) -> Handoff:
    token = 7 if verb is HandoffVerb.DONE else None
    return Handoff(verb=verb, id=name, attempt=attempt, node=node, room=room, rendezvous="x:1", token=token)


def hand(world: World, told: Handoff) -> tuple[bool, str]:
    node = world.nodes[D]
    reply, effects = node.core.handoff(told, world.now, node.room)
    world.perform(D, effects)
    return reply.granted, reply.reason


def test_a_held_leg_takes_no_device_memory() -> None:
    world = World(D)
    world.serve(D, request("q", Phase.DECODE, P))
    world.tick(1.0)
    assert world.nodes[D].engine == {}
    assert world.nodes[D].core.counts().waiting == 1


def test_a_grant_said_twice_enters_once() -> None:
    world = World(D)
    world.serve(D, request("q", Phase.DECODE, P))
    assert hand(world, message(HandoffVerb.RESERVE, "q")) == (True, "")
    assert hand(world, message(HandoffVerb.RESERVE, "q")) == (True, "")
    assert len(world.nodes[D].engine) == 1


def test_done_said_twice_starts_once() -> None:
    world = World(D)
    world.serve(D, request("q", Phase.DECODE, P))
    assert hand(world, message(HandoffVerb.DONE, "q")) == (False, "unknown"), "not reserved"
    hand(world, message(HandoffVerb.RESERVE, "q"))
    assert hand(world, message(HandoffVerb.DONE, "q")) == (True, "")
    assert hand(world, message(HandoffVerb.DONE, "q")) == (True, "")
    world.settle()
    assert world.nodes[D].finishes("q") == [(1, Phase.DECODE, Finish.STOP)]


def test_strangers_get_nothing() -> None:
    world = World(D)
    world.serve(D, request("q", Phase.DECODE, P, room=5))
    assert hand(world, message(HandoffVerb.RESERVE, "q", room=4)) == (False, "unknown"), "another transfer id"
    assert hand(world, message(HandoffVerb.RESERVE, "q", room=5, node=P2)) == (False, "unknown"), "another node"
    assert hand(world, message(HandoffVerb.RESERVE, "q", room=5, attempt=2)) == (False, "unknown")
    assert hand(world, message(HandoffVerb.RESERVE, "nobody")) == (False, "unknown")
    world.command(D, Phase.PREFILL, 1)
    assert hand(world, message(HandoffVerb.RESERVE, "q", room=5)) == (False, "phase")


def test_case_7_a_failed_prefill_frees_what_decode_has_reserved() -> None:
    world = World(P, D)
    world.pair("q", P, D)
    world.deliver(0)
    world.tick()
    world.deliver(0)
    free = world.nodes[D].room
    world.advance(P, LegKey("q", 1, Phase.PREFILL), error=True)
    world.settle()
    assert world.nodes[D].room > free
    assert world.nodes[D].finishes("q") == [(1, Phase.DECODE, Finish.CANCELLED)]
    assert world.nodes[D].reports[-1].reason.startswith("prefill: ")
    assert world.nodes[P].finishes("q") == [(1, Phase.PREFILL, Finish.ERROR)]
    assert world.now < 1.0
    world.assert_empty()


def test_case_13_a_late_done_of_the_first_attempt_changes_nothing() -> None:
    world = World(D)
    world.serve(D, request("q", Phase.DECODE, P, attempt=1, room=1))
    hand(world, message(HandoffVerb.RESERVE, "q", attempt=1, room=1))
    world.serve(D, request("q", Phase.DECODE, P, attempt=2, room=2))
    hand(world, message(HandoffVerb.RESERVE, "q", attempt=2, room=2))
    assert hand(world, message(HandoffVerb.DONE, "q", attempt=1, room=1)) == (False, "unknown")
    assert hand(world, message(HandoffVerb.DONE, "q", attempt=2, room=1)) == (False, "unknown")
    assert world.nodes[D].engine[LegKey("q", 2, Phase.DECODE)].token is None


def test_case_3_a_dead_prefill_node_gives_the_decode_memory_back() -> None:
    world = World(P, P2, D, node_timeout_s=1.5)
    for number in range(4):
        world.pair(f"q{number}", P, D, prompt=8, new=4)
    for _ in range(3):
        while world.pending:
            world.deliver(0)
        world.tick()
    reserved = len(world.nodes[D].engine)
    assert reserved > 0
    world.nodes[P].alive = False
    started = world.now
    while world.nodes[D].engine:
        world.settle()
        world.tick(0.1)
        assert world.now - started < 2.0, "the peer lease"
    assert world.nodes[D].room == 96
    assert {finish for r in range(4) for _, _, finish in world.nodes[D].finishes(f"q{r}")} == {Finish.REQUEUED}
    world.pair("fifth", P2, D)
    world.settle()
    assert world.nodes[D].finishes("fifth") == [(1, Phase.DECODE, Finish.STOP)]


def test_a_decoding_leg_outlives_its_prefill_node() -> None:
    world = World(P, D, node_timeout_s=1.0)
    world.serve(D, request("q", Phase.DECODE, P))
    hand(world, message(HandoffVerb.RESERVE, "q"))
    hand(world, message(HandoffVerb.DONE, "q"))
    world.advance(D, LegKey("q", 1, Phase.DECODE))
    world.nodes[P].alive = False
    for _ in range(20):
        world.tick(0.2)
    assert world.nodes[D].finishes("q") == []


def test_case_9_legs_that_only_wait_for_their_turn_are_not_given_up() -> None:
    """One runs at a time, each for 0.5 s, peers are lost after 1 s: all eight end well because heartbeats go on."""
    world = World(P, D, max_running=1, spare_decodes=0, node_timeout_s=1.0)
    for number in range(8):
        world.pair(f"q{number}", P, D, prompt=8, new=4)
    for _ in range(8):
        while not any(inside.token for inside in world.nodes[D].engine.values()):
            while world.pending:
                world.deliver(0)
            for key in list(world.nodes[P].engine):
                world.advance(P, key)
            world.tick()
        for _ in range(25):
            world.tick(0.02)
        [key] = world.nodes[D].engine
        world.advance(D, key)
        world.advance(D, key)
    assert [world.nodes[D].finishes(f"q{n}") for n in range(8)] == [[(1, Phase.DECODE, Finish.STOP)]] * 8


def test_a_smaller_leg_passes_one_that_finds_no_room() -> None:
    world = World(D)
    for name, prompt in (("running", 40), ("large", 56), ("small", 16)):
        world.serve(D, request(name, Phase.DECODE, P, prompt=prompt, new=8))
    assert hand(world, message(HandoffVerb.RESERVE, "running"))[0]
    assert hand(world, message(HandoffVerb.RESERVE, "large")) == (False, "full")
    assert hand(world, message(HandoffVerb.RESERVE, "small")) == (True, "")


def test_case_73_a_large_leg_is_not_starved_by_small_ones() -> None:
    """L needs 80 of 96 tokens. S legs of 40 come every second and run for 1.5 s: L has its room by 2.5 s."""
    world = World(P, D)
    world.serve(D, request("running", Phase.DECODE, P, prompt=32, new=8))
    hand(world, message(HandoffVerb.RESERVE, "running"))
    hand(world, message(HandoffVerb.DONE, "running"))
    world.serve(D, request("large", Phase.DECODE, P, prompt=56, new=8))
    ends = {"running": 1.5}
    number = 0
    while world.now < 2.5:
        if hand(world, message(HandoffVerb.RESERVE, "large"))[0]:
            break
        if world.now >= number:
            world.serve(D, request(f"small{number}", Phase.DECODE, P, prompt=32, new=8))
            number += 1
        for each in range(number):
            if f"small{each}" not in ends and hand(world, message(HandoffVerb.RESERVE, f"small{each}"))[0]:
                hand(world, message(HandoffVerb.DONE, f"small{each}"))
                ends[f"small{each}"] = world.now + 1.5
        for name, end in ends.items():
            key = LegKey(name, 1, Phase.DECODE)
            while world.now >= end and key in world.nodes[D].engine:
                world.advance(D, key)
        world.tick(0.05)
    assert LegKey("large", 1, Phase.DECODE) in world.nodes[D].engine
    assert "small0" in ends, "small ones did pass while it was young"


def test_a_leg_nobody_asks_for_any_more_keeps_nobody_waiting() -> None:
    world = World(D)
    for name, prompt in (("running", 40), ("large", 56), ("small", 16)):
        world.serve(D, request(name, Phase.DECODE, P, prompt=prompt, new=8))
    hand(world, message(HandoffVerb.RESERVE, "running"))
    hand(world, message(HandoffVerb.RESERVE, "large"))
    world.now += 0.4
    assert hand(world, message(HandoffVerb.RESERVE, "small")) == (False, "full"), "its patience is over"
    world.now += 0.2
    assert hand(world, message(HandoffVerb.RESERVE, "small")) == (True, "")
