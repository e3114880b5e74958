"""What a branch waits for: the context event says so when the answer ended in tool calls."""

import pytest

from services.router.api.answer import AnswerResponse, Job
from services.router.api.vigil import Patience
from services.router.calls import Call
from services.router.core.effects import End, StoreContext
from services.router.messages import context_event


class Reader:
    """Reads tokens as themselves; the token 7 is a tool call."""

    stopped = False
    stop = None

    def __init__(self) -> None:
        self.calls = 0

    async def read(self, tokens: list[int], end: End | None) -> list[object]:
        self.calls += tokens.count(7)
        return []

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("tokens", "finish"), [([1, 7, 2], "tool_calls"), ([1, 2], "")])
async def test_a_tool_call_read_before_the_end_is_told(tokens: list[int], finish: str) -> None:
    call = Call("r")
    job = Job(call, None, Reader(), stream=True, request_id="r")  # type: ignore[arg-type]  # it says nothing here
    answer = AnswerResponse(job, None, Patience(1.0, 1.0))  # type: ignore[arg-type]  # nothing is cancelled
    call.push(tokens)
    await answer._read()
    stored = StoreContext(
        request="r", tenant="", branch="b", version=0, parent=None, kind=None, lineage="opens", life=0, inferred=False,
        tip=1, blocks=1, base_blocks=0, base=None, keys=bytes(8), prompt_blocks=1, prefill_node="p", decode_node="d",
    )  # fmt: skip
    assert context_event(stored, 0.0, "tool_calls" if call.uses_tools else "").finish == finish
