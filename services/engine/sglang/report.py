"""What the scheduler tells the backend: collected during one turn of its loop, sent as one `Step`."""

from typing import Any

from schemas.block_key import token_bytes
from schemas.kv import LocationChange
from schemas.serve import Finish, RequestState
from schemas.telemetry import Iteration
from services.engine.sglang.frames import End, State, Step, Tokens

_FINISHES = {"FINISH_LENGTH": Finish.LENGTH, "FINISH_MATCHED_TOKEN": Finish.STOP, "FINISH_MATCHED_STR": Finish.STOP}


class Report:
    """States, tokens and ends of this turn. Requests are SGLang's `Req`."""

    def __init__(self) -> None:
        self._sent: dict[str, int] = {}
        self._ending: dict[str, End] = {}
        self._entered: list[str] = []
        self._states: list[State] = []
        self._tokens: list[Tokens] = []
        self._iterations: list[Iteration] = []

    def entered(self, rid: str) -> None:
        """A request has reached the scheduler."""
        self._entered.append(rid)

    def state(self, rid: str, state: RequestState, cached_tokens: int = 0, restored_tokens: int = 0) -> None:
        """A request went on."""
        self._states.append(State(rid, state, cached_tokens, restored_tokens))

    def iteration(self, iteration: Iteration) -> None:
        """One iteration ended."""
        self._iterations.append(iteration)

    def progress(self, request: Any) -> None:
        """Tell the tokens of a request that were not told yet."""
        output = request.output_ids_through_stop if request.finished() else request.output_ids
        sent = self._sent.get(request.rid, 0)
        if len(output) > sent:
            self._tokens.append(Tokens(request.rid, sent, token_bytes(output[sent:])))
            self._sent[request.rid] = len(output)

    def ended(self, request: Any) -> None:
        """A request has finished: its last tokens, and its end as soon as nothing of it is left."""
        self.progress(request)
        reason = request.finished_reason
        finish = _FINISHES.get(type(reason).__name__, Finish.ERROR)
        text = str(getattr(reason, "message", "") or "") if finish is Finish.ERROR else ""
        self._ending[request.rid] = End(request.rid, finish, text, request.cached_tokens)

    def aborted(self, request: Any, text: str) -> None:
        """A request left a queue without having finished."""
        self._ending[request.rid] = End(request.rid, Finish.ERROR, text, request.cached_tokens)

    def step(self, used_tokens: int, held: set[str], changes: list[LocationChange]) -> Step | None:
        """This turn's message, or None if nothing happened. Ends of `held` requests wait: a peer may still write
        into their pages."""
        out = [end for rid, end in self._ending.items() if rid not in held]
        for end in out:
            del self._ending[end.rid]
            self._sent.pop(end.rid, None)
        if not (out or changes or self._entered or self._states or self._tokens or self._iterations):
            return None
        step = Step(
            used_tokens=used_tokens,
            entered=self._entered,
            states=self._states,
            tokens=self._tokens,
            ends=out,
            iterations=self._iterations,
            changes=changes,
        )
        self._entered, self._states, self._tokens, self._iterations = [], [], [], []
        return step
