"""Frames between the router and a process beside it: cut anywhere, answered in order, each failure its own."""

import io
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from services.router.text.worker_frames import Frames, frame, serve

MESSAGES = st.lists(st.lists(st.one_of(st.integers(0, 9), st.text(max_size=9), st.binary(max_size=300)), max_size=4))


@given(MESSAGES, st.lists(st.integers(1, 50), min_size=1))
def test_messages_come_whole_however_their_bytes_are_cut(messages: list[list[Any]], sizes: list[int]) -> None:
    data, frames, found, begin = b"".join(map(frame, messages)), Frames(), list[list[Any]](), 0
    while begin < len(data):
        size = sizes[begin % len(sizes)]
        found += frames.feed(data[begin : begin + size])
        begin += size
    assert found == messages


def test_each_request_is_answered_and_a_failure_is_its_own() -> None:
    def handle(verb: str, key: str, payload: Any) -> Any:
        return {"twice": lambda: payload * 2}[verb]()

    target = io.BytesIO()
    requests = [[1, "twice", "a", "x"], [2, "thrice", "a", "x"], [3, "twice", "b", 4]]
    serve(io.BytesIO(b"".join(map(frame, requests))), target, handle)
    assert Frames().feed(target.getvalue()) == [[1, None, "xx"], [2, "KeyError: 'thrice'", None], [3, None, 8]]
