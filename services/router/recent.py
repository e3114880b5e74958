"""The last requests that ended, for whoever asks why they took what they took."""

from collections import OrderedDict

from schemas.telemetry import RequestTelemetry

KEPT = 2000


class RecentRequests:
    """By the router's own id, which begins with the client's; oldest first."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._requests: OrderedDict[str, tuple[str, RequestTelemetry]] = OrderedDict()

    def add(self, tenant: str, telemetry: RequestTelemetry) -> None:
        """A request of `tenant` ended."""
        self._requests[telemetry.request] = tenant, telemetry
        if len(self._requests) > self._kept:
            self._requests.popitem(last=False)

    def find(self, tenant: str, request: str) -> RequestTelemetry | None:
        """The last one of this id, ours or the client's."""
        for own, (whose, telemetry) in reversed(self._requests.items()):
            if whose == tenant and (own == request or own.rpartition("-")[0] == request):
                return telemetry
        return None

    def of_branch(self, tenant: str, branch: str, limit: int) -> list[RequestTelemetry]:
        """The last `limit` of a branch, newest first."""
        found = (told for whose, told in reversed(self._requests.values()) if (whose, told.branch) == (tenant, branch))
        return [telemetry for telemetry, _ in zip(found, range(limit), strict=False)]
