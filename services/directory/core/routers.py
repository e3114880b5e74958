"""Which routers live: what one asked that is gone, nobody will withdraw."""

from __future__ import annotations


class Routers:
    """The life of each router and when it was last heard of; one silent for longer than `timeout_s` is gone."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._heard: dict[str, tuple[int, float]] = {}

    def seen(self, router: str, incarnation: int, now: float) -> bool:
        """A sign of life; whether it is of another life than the last one. Incarnations have no order."""
        former, _ = self._heard.get(router, (incarnation, now))
        self._heard[router] = (incarnation, now)
        return former != incarnation

    def gone(self, now: float) -> list[str]:
        """Those silent for too long; each is said once."""
        silent = [router for router, (_, heard) in self._heard.items() if now - heard > self._timeout_s]
        for router in silent:
            del self._heard[router]
        return silent
