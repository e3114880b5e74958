"""Frames of the pool's socket, however the bytes come in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.codec import RejectedMessage
from schemas.pool import LocalCall, LocalReply
from services.local_call import MAX_FRAME_BYTES, FrameSplitter, PoolRefused, frame
from services.local_call.frames import decode_call, decode_reply


@given(st.lists(st.binary(max_size=60), max_size=8), st.lists(st.integers(1, 20), min_size=1, max_size=100))
def test_frames_come_out_whole_and_in_order_however_they_are_cut(bodies: list[bytes], cuts: list[int]) -> None:
    calls = [LocalCall(call=i, verb="locate", body=body) for i, body in enumerate(bodies)]
    stream = b"".join(frame(call) for call in calls)
    splitter, found, at = FrameSplitter(), [], 0
    for turn in range(len(stream) + 1):
        size = cuts[turn % len(cuts)]
        found += splitter.feed(stream[at : at + size])
        at += size
    assert [decode_call(body) for body in found] == calls


def test_a_frame_that_is_too_large_is_refused_on_both_sides() -> None:
    with pytest.raises(PoolRefused, match=f"at most {MAX_FRAME_BYTES} are taken"):
        frame(LocalCall(call=1, verb="allocate", body=bytes(MAX_FRAME_BYTES)))
    with pytest.raises(RejectedMessage, match=f"at most {MAX_FRAME_BYTES} are taken"):
        FrameSplitter().feed((MAX_FRAME_BYTES + 1).to_bytes(4, "little"))


@pytest.mark.parametrize("body", [b"", b"\x81", b"\x93" * 2000, b"junk", b"\x81\xa4call\xa3abc"])
def test_bytes_that_are_no_call_are_rejected(body: bytes) -> None:
    with pytest.raises(RejectedMessage, match="no local call or reply"):
        decode_call(body)
    with pytest.raises(RejectedMessage, match="no local call or reply"):
        decode_reply(body)


def test_a_reply_survives_the_wire() -> None:
    reply = LocalReply(call=3, body=b"x" * 100, error="why")
    (body,) = FrameSplitter().feed(frame(reply))
    assert decode_reply(body) == reply
