"""What the broker does not let us do: read from its errors, remembered until it is over."""

import re
from dataclasses import dataclass

from services.clock import Clock

PUBLISH_REFUSAL_S = 60.0
"""A refused publish is taken as still refused for this long: the broker says so only when one is tried."""

_VIOLATION = re.compile(r"permissions violation for (publish|subscription) to \"([^\"]+)\"", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Refusal:
    """One subject that may not be published or subscribed to; nats-py gives it in lower case."""

    action: str
    subject: str

    def __str__(self) -> str:
        return f"no permission to {'publish' if self.action == 'publish' else 'subscribe'} to {self.subject}"


def parse_refusal(text: str) -> Refusal | None:
    """The refusal that an error text of the broker tells of, None if it tells of something else."""
    found = _VIOLATION.search(text)
    return Refusal(found[1].lower(), found[2]) if found else None


def _same(one: str, other: str) -> bool:
    return one.casefold() == other.casefold()


class Refusals:
    """The refusals in force: a publish until a minute after the last try, a subscription until it is granted."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seen: dict[Refusal, float] = {}
        self.key_refused = False

    def add(self, refusal: Refusal) -> None:
        self._seen[refusal] = self._clock.now()

    def said(self, subject: str) -> float | None:
        """When the broker last refused a subscription to `subject`."""
        times = [seen for r, seen in self._seen.items() if r.action == "subscription" and _same(r.subject, subject)]
        return max(times, default=None)

    def granted(self, subject: str) -> None:
        """A subscription to `subject` is in force or no longer wanted."""
        for refusal in [r for r in self._seen if r.action == "subscription" and _same(r.subject, subject)]:
            del self._seen[refusal]

    def clear(self) -> None:
        """A new connection: everything is tried again."""
        self._seen.clear()
        self.key_refused = False

    def current(self) -> list[str]:
        """Each refusal in force, in words."""
        oldest = self._clock.now() - PUBLISH_REFUSAL_S
        key = ["the broker does not accept our key"] if self.key_refused else []
        return key + [str(r) for r, seen in self._seen.items() if r.action == "subscription" or seen >= oldest]
