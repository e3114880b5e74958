"""How the backend reads what SGLang's processes report; the processes themselves are in tests/e2e."""

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from schemas.block_key import token_bytes
from schemas.phase import Phase
from schemas.serve import Finish, RequestState, Sampling
from services.engine.backend import BackendInfo, Leg, LegKey
from services.engine.sglang.backend import SglangBackend
from services.engine.sglang.config import SglangSettings
from services.engine.sglang.frames import Cancel, DropDecodeCache, End, Frame, Refused, State, Step, Submit, Tokens

EOS = 2


@dataclass
class Wire:
    """In the place of the engine's process: keeps what is sent to it."""

    sent: list[Frame] = field(default_factory=list)

    def send(self, role: str, frame: Frame) -> None:
        assert role == "worker"
        self.sent.append(frame)


class Events:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.calls.append((name, *args))


@pytest.fixture
def backend() -> SglangBackend:
    backend = SglangBackend(SglangSettings(l1_tokens=1000))
    backend._process, backend._events, backend._eos = Wire(), Events(), frozenset({EOS})
    backend.info = BackendInfo("sglang", "m", "float32", 16, 1, "k", 1, 1000, 4096, 2, 256, "h:1")
    return backend


def leg(phase: Phase, prompt: int = 30, **sampling: Any) -> Leg:
    return Leg(
        key=LegKey("r", 1, phase),
        tokens=token_bytes(range(prompt)),
        prompt_tokens=prompt,
        sampling=Sampling(**{"max_new_tokens": 8, **sampling}),
        room=7,
        peer="p",
        rendezvous="h:1",
        session="b@3",
    )


def submitted(backend: SglangBackend, it: Leg) -> str:
    backend.submit(it)
    frame = backend._process.sent[-1]
    assert isinstance(frame, Submit)
    return frame.rid


def test_no_request_name_is_the_beginning_of_another(backend: SglangBackend) -> None:
    rids = [submitted(backend, leg(phase)) for phase in (Phase.PREFILL, Phase.DECODE)]
    assert not any(a != b and b.startswith(a) for a in rids for b in rids), "SGLang aborts by prefix"


def test_a_legs_life_in_the_order_of_the_protocol(backend: SglangBackend) -> None:
    it = leg(Phase.DECODE)
    rid = submitted(backend, it)
    backend._frame(Step(used_tokens=48, entered=[rid]))
    backend._frame(Step(used_tokens=48, tokens=[Tokens(rid, 0, token_bytes([9, 8]))]))
    backend._frame(
        Step(used_tokens=32, tokens=[Tokens(rid, 2, token_bytes([7]))], ends=[End(rid, Finish.LENGTH, "", 16)])
    )
    assert backend._events.calls == [
        ("state", it.key, RequestState.DECODING),
        ("tokens", it.key, 0, [9, 8]),
        ("tokens", it.key, 2, [7]),
        ("ended", it.key, Finish.LENGTH, "", 16, 0),
    ]
    assert backend.used_tokens() == 32


@pytest.mark.parametrize(
    ("sampling", "token", "finish"),
    [
        ({}, 9, Finish.HANDED_OFF),
        ({"max_new_tokens": 1}, 9, Finish.LENGTH),
        ({}, EOS, Finish.STOP),
        ({"ignore_eos": True}, EOS, Finish.HANDED_OFF),
        ({"stop_token_ids": [9], "ignore_eos": True}, 9, Finish.STOP),
        ({"stop_token_ids": [9], "min_new_tokens": 2}, 9, Finish.HANDED_OFF),
    ],
)
def test_a_prefill_leg_says_whether_its_token_was_the_last(
    backend: SglangBackend, sampling: dict[str, Any], token: int, finish: Finish
) -> None:
    rid = submitted(backend, leg(Phase.PREFILL, **sampling))
    backend._frame(
        Step(
            used_tokens=0,
            states=[State(rid, RequestState.PREFILLING, 32, 16)],
            tokens=[Tokens(rid, 0, token_bytes([token]))],
            ends=[End(rid, Finish.LENGTH, "", 0)],
        )
    )
    assert backend._events.calls[-1][2:] == (finish, "", 32, 16)


def test_a_stop_token_ends_an_answer_that_ignores_end_of_sequence(backend: SglangBackend) -> None:
    it = leg(Phase.DECODE, stop_token_ids=[5], ignore_eos=True, min_new_tokens=2)
    rid = submitted(backend, it)
    backend._frame(Step(used_tokens=0, tokens=[Tokens(rid, 0, token_bytes([5, 4, 5, 6]))]))
    backend._frame(Step(used_tokens=0, tokens=[Tokens(rid, 4, token_bytes([7]))]))
    assert backend._process.sent[-1] == Cancel(rid=rid)
    backend._frame(Step(used_tokens=0, ends=[End(rid, Finish.ERROR, "Aborted", 0)]))
    assert [call for call in backend._events.calls if call[0] != "state"] == [
        ("tokens", it.key, 0, [5, 4, 5]),
        ("ended", it.key, Finish.STOP, "", 0, 0),
    ]


def test_a_cancelled_leg_ends_cancelled_and_an_error_stays_one(backend: SglangBackend) -> None:
    cancelled, failed = leg(Phase.DECODE), leg(Phase.PREFILL)
    first, second = submitted(backend, cancelled), submitted(backend, failed)
    backend.cancel(cancelled.key)
    backend.cancel(cancelled.key)
    backend.cancel(LegKey("unknown", 1, Phase.DECODE))
    assert sum(isinstance(frame, Cancel) for frame in backend._process.sent) == 1
    ends = [End(first, Finish.ERROR, "Aborted", 0), End(second, Finish.ERROR, "transfer failed", 0)]
    backend._frame(Step(used_tokens=0, ends=ends))
    assert [call[2:4] for call in backend._events.calls] == [
        (Finish.CANCELLED, ""),
        (Finish.ERROR, "transfer failed"),
    ]


async def test_a_refusal_counts_only_if_the_scheduler_never_saw_the_leg(
    backend: SglangBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.engine.sglang.backend._REFUSED_S", 0.01)
    seen, unseen = leg(Phase.DECODE), leg(Phase.PREFILL)
    first, second = submitted(backend, seen), submitted(backend, unseen)
    backend._frame(Refused(rid=first, reason="500"))
    backend._frame(Refused(rid=second, reason="too long"))
    backend._frame(Step(used_tokens=0, entered=[first]))
    await asyncio.sleep(0.05)
    assert [call[1:4] for call in backend._events.calls] == [(unseen.key, Finish.ERROR, "too long")]


def test_room_is_what_legs_inside_leave(backend: SglangBackend) -> None:
    assert backend.room(Phase.DECODE) == backend.room(Phase.PREFILL) == 984
    rid = submitted(backend, leg(Phase.DECODE, prompt=30))
    assert backend.room(Phase.PREFILL) == 984 - 64, "38 tokens are three pages, one more to spare"
    submitted(backend, leg(Phase.PREFILL, prompt=100))
    assert backend.room(Phase.DECODE) == 984 - 64 - 128
    backend._frame(Step(used_tokens=0, ends=[End(rid, Finish.LENGTH, "", 0)]))
    assert backend.room(Phase.DECODE) == 984 - 128


def test_no_room_beyond_the_largest_batch(backend: SglangBackend) -> None:
    for number in range(2):
        backend.submit(replace(leg(Phase.DECODE), key=LegKey(str(number), 1, Phase.DECODE)))
    assert backend.room(Phase.DECODE) == 0
    assert backend.room(Phase.PREFILL) > 0


def test_a_dead_engine_loses_its_legs_and_says_so_once(backend: SglangBackend) -> None:
    rid = submitted(backend, leg(Phase.DECODE))
    backend.drop_decode_cache()
    assert backend._process.sent[-1] == DropDecodeCache()
    backend._failed("killed")
    backend._frame(Step(used_tokens=0, ends=[End(rid, Finish.LENGTH, "", 0)]))
    assert backend._events.calls == [("failed", "killed")]
    assert backend.room(Phase.DECODE) == 984
