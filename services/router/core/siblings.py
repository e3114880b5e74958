"""Requests that wait for a prefix which another one is computing: sub-agents that start together compute it once.

Placed at once they would all compute it, on one node or on many. So a request waits until the prompt of the one ahead
is there, and is then placed like any other: behind it on its node, or on another that fetches the prefix, whichever is
predicted faster. None waits longer than computing alone would take it.
"""

from dataclasses import dataclass

from schemas.directory import MatchReply
from services.router.core.request import Request

WORTH_TOKENS = 512
"""A shorter common part is computed again sooner than it is waited for."""
POLL_S = 0.1
"""How often the directory is asked about a request of another router."""


@dataclass(slots=True)
class Hold:
    """`ahead` computes the prefix; `until`: when waiting has taken as long as computing (monotonic seconds); `ask_at`:
    when the directory is asked again, None while an answer is awaited."""

    ahead: str
    until: float
    ask_at: float | None


class Siblings:
    """Who waits for whom. An entry belongs to an open request and ends when it is placed or has ended."""

    def __init__(self) -> None:
        self._holds: dict[str, Hold] = {}
        self._behind: dict[str, set[str]] = {}

    def __len__(self) -> int:
        return sum(hold.ask_at is not None for hold in self._holds.values())

    def wait(self, request: Request, ahead: Request | None, alone_s: float, now: float) -> bool:
        """Whether this request waits, `alone_s` being what it would take to compute it all. `ahead` is the one its
        match names, None if that is another router's."""
        match, former = request.match, self._holds.get(request.id)
        until = now + alone_s if former is None else former.until
        self.forget(request.id)
        pending = match.pending_request
        if (
            pending is None
            or pending == request.id
            or now >= until
            or not worth(match, request.context.scheme.block_size)
        ):
            return False
        if ahead is not None and (ahead.times.first_token is not None or _eta_s(ahead, now) > until - now):
            return False
        ask_at = until if ahead is not None else min(until, now + POLL_S)
        self._holds[request.id] = Hold(pending, until, ask_at)
        self._behind.setdefault(pending, set()).add(request.id)
        return True

    def awaits(self, request: str) -> bool:
        """Whether anybody waits for the prompt of `request`."""
        return request in self._behind

    def there(self, request: str) -> list[str]:
        """The prompt of `request` has been computed, or never will be: who goes on."""
        found = sorted(self._behind.pop(request, ()))
        for waiting in found:
            self._holds[waiting].ask_at = None
        return found

    def due(self, now: float) -> list[str]:
        """Who has waited long enough, or is to ask the directory again."""
        found = [id_ for id_, hold in self._holds.items() if hold.ask_at is not None and hold.ask_at <= now]
        for waiting in found:
            hold = self._holds[waiting]
            hold.ask_at = None
            self._leave(waiting, hold)
        return found

    def forget(self, request: str) -> None:
        """It was placed, or has ended."""
        hold = self._holds.pop(request, None)
        if hold is not None:
            self._leave(request, hold)

    def _leave(self, request: str, hold: Hold) -> None:
        behind = self._behind.get(hold.ahead)
        if behind is not None:
            behind.discard(request)
            if not behind:
                del self._behind[hold.ahead]

    def check(self, open_requests: set[str]) -> None:
        """Only open requests wait, each for exactly one other."""
        assert self._holds.keys() <= open_requests
        waiting = {(hold.ahead, id_) for id_, hold in self._holds.items() if hold.ask_at is not None}
        assert waiting == {(ahead, id_) for ahead, behind in self._behind.items() for id_ in behind}


def worth(match: MatchReply, block_size: int) -> bool:
    """Whether what the one ahead computes is long enough to be waited for, what lies in the cluster left aside."""
    return (match.pending_blocks - match.blocks) * block_size >= WORTH_TOKENS


def _eta_s(ahead: Request, now: float) -> float:
    """Predicted seconds until its prompt is there; what has no place yet may come at once."""
    placed, predicted = ahead.times.placed, ahead.times.predicted_ttft_s
    return 0.0 if placed is None or predicted is None else placed + predicted - now
