"""Legs of which the router hears nothing: none stays held after its request, none waits for ever."""

from schemas.block_key import PLAIN, token_bytes
from schemas.directory import MatchReply
from schemas.kv import Capacities, NodeHello
from schemas.phase import Phase
from schemas.serve import Finish, LegUpdate, ReplyBatch, RequestState, Sampling, ServeReply
from schemas.telemetry import KvUse, NodeTelemetry, TierUse
from services.router.core.admission import Limits
from services.router.core.context import Context, KeyScheme
from services.router.core.effects import AskAgain, AskDirectory, CancelLeg, Effect, EmitTokens, End, SendLeg
from services.router.core.identity import Identity
from services.router.core.leg import DECODE_SILENCE_S, MISSED_S
from services.router.core.router import RouterCore
from services.router.core.spec import Spec

NODES = ("a", "b", "c", "d", "e", "f", "g")
MATCH = MatchReply(blocks=0, known_blocks=0)
TIER = TierUse(used=0, total=1 << 20)


def router() -> RouterCore:
    core = RouterCore(Limits(100), rooms_from=1, node_timeout_s=1e9)
    for node in NODES:
        sizes = Capacities(l1_tokens=1 << 20, l2_tokens=1 << 20)
        core.on_hello(
            NodeHello(
                node=node, incarnation=1, engine_incarnation=1, model="m", block_size=64, key_version=PLAIN, ranks=1,
                engine="timed", dtype="fp32", capacities=sizes, transfer="",
            ),
            0.0,
        )  # fmt: skip
        core.on_telemetry(
            NodeTelemetry(
                node=node, t=0, incarnation=1, phase=Phase.BOTH, epoch=0, waiting=0, running=0,
                kv=KvUse(l1=TIER, l2=TIER), last_kv_seq=0, engine_incarnation=1,
            ),
            0.0,
        )  # fmt: skip
    return core


def submitted(core: RouterCore) -> list[Effect]:
    context = Context.of(token_bytes(list(range(200))), KeyScheme(64, PLAIN))
    core.submit(Spec("r", Identity(""), context, Sampling(max_new_tokens=4)), 0.0)
    return core.on_match("r", 1, MATCH, 0.0)


def legs(effects: list[Effect], phase: Phase) -> list[SendLeg]:
    return [effect for effect in effects if isinstance(effect, SendLeg) and effect.phase is phase]


def cancelled(effects: list[Effect]) -> set[tuple[Phase, str, int]]:
    return {(effect.phase, effect.node, effect.attempt) for effect in effects if isinstance(effect, CancelLeg)}


def test_every_decode_leg_whose_answer_was_lost_is_cancelled() -> None:
    core, asked, gone = router(), set[tuple[Phase, str, int]](), set[tuple[Phase, str, int]]()
    effects, now = submitted(core), 0.0
    for _ in range(50):
        gone |= cancelled(effects)
        if any(isinstance(effect, End) for effect in effects):
            break
        now += 1.0
        silent = legs(effects, Phase.DECODE)
        asked |= {(Phase.DECODE, leg.node, leg.attempt) for leg in silent}
        for leg in legs(effects, Phase.PREFILL):
            core.on_answer("r", Phase.PREFILL, leg.node, leg.attempt, ServeReply(accepted=True, epoch=0), now)
        effects = [
            effect for leg in silent for effect in core.on_answer("r", Phase.DECODE, leg.node, leg.attempt, None, now)
        ]
        effects += core.tick(now)
        for ask in [effect for effect in effects if isinstance(effect, AskDirectory)]:
            effects += core.on_match("r", ask.attempt, MATCH, now)
    else:
        raise AssertionError("the request did not end")
    assert len(asked) > 1
    assert asked <= gone
    assert not core.ledger.booked()


def test_a_decode_leg_that_was_passed_over_by_its_hand_off_is_tried_again() -> None:
    core = router()
    effects = submitted(core)
    (prefill,), (decode,) = legs(effects, Phase.PREFILL), legs(effects, Phase.DECODE)
    for leg in (prefill, decode):
        core.on_answer("r", leg.phase, leg.node, leg.attempt, ServeReply(accepted=True, epoch=0), 0.0)
    update = LegUpdate(
        id="r", attempt=1, phase=Phase.PREFILL, seq=0, state=RequestState.ENDED, finish=Finish.HANDED_OFF
    )
    core.on_reply(ReplyBatch(node=prefill.node, incarnation=1, t=0.0, updates=[update]), 1.0)
    early = core.tick(1.0 + MISSED_S)
    assert (Phase.DECODE, decode.node, 1) not in cancelled(early)
    late = core.tick(1.1 + MISSED_S)
    assert (Phase.DECODE, decode.node, 1) in cancelled(late)
    assert [effect.attempt for effect in late if isinstance(effect, AskDirectory)] == [2]


def decoding(core: RouterCore) -> str:
    """The node that decodes: one token came from the prefill at 0, one from the decode leg at 1, a tick has looked."""
    effects = submitted(core)
    (prefill,), (decode,) = legs(effects, Phase.PREFILL), legs(effects, Phase.DECODE)
    first = LegUpdate(id="r", attempt=1, phase=Phase.PREFILL, tokens=token_bytes([1]), finish=Finish.HANDED_OFF)
    core.on_reply(ReplyBatch(node=prefill.node, incarnation=1, t=0.0, updates=[first]), 0.0)
    state = LegUpdate(id="r", attempt=1, phase=Phase.DECODE, state=RequestState.DECODING)
    core.on_reply(ReplyBatch(node=decode.node, incarnation=1, t=0.0, updates=[state]), 0.5)
    assert grow(core, decode.node, 1, [2], 1.0) == [EmitTokens("r", [2])]
    assert core.tick(1.1) == []
    return decode.node


def grow(core: RouterCore, node: str, seq: int, tokens: list[int], now: float) -> list[Effect]:
    update = LegUpdate(id="r", attempt=1, phase=Phase.DECODE, seq=seq, tokens=token_bytes(tokens))
    return core.on_reply(ReplyBatch(node=node, incarnation=1, t=0.0, updates=[update]), now)


def test_a_growing_answer_that_falls_silent_is_asked_for() -> None:
    core = router()
    node = decoding(core)
    assert grow(core, node, 2, [3], 2.0) == [EmitTokens("r", [3])]
    assert core.tick(1.9 + DECODE_SILENCE_S) == []
    assert core.tick(2.1 + DECODE_SILENCE_S) == [AskAgain("r", 1, Phase.DECODE, node, 3)]


def test_what_is_missing_of_a_growing_answer_is_asked_for_until_it_comes() -> None:
    core = router()
    node = decoding(core)
    missing = [AskAgain("r", 1, Phase.DECODE, node, 2)]
    assert grow(core, node, 3, [4], 1.2) == missing
    assert core.tick(2.0) == []
    assert core.tick(2.3) == missing
    assert grow(core, node, 2, [3, 4], 2.4) == [EmitTokens("r", [3, 4])]
    assert core.tick(3.5) == []


def test_tokens_said_twice_or_by_another_leg_do_not_make_an_answer_grow() -> None:
    core = router()
    node = decoding(core)
    assert grow(core, node, 0, [1, 2], 1.2) == []
    assert grow(core, node, 1, [2, 3], 1.3) == [EmitTokens("r", [3])]
    assert grow(core, "another", 3, [9], 1.4) == []
