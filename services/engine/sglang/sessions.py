"""Which of SGLang's radix sessions may be closed: older versions of a branch, and branches silent beyond their lease.

SGLang keeps blocks of open sessions longest in device memory. A session is "<branch>@<version>".
"""


class Sessions:
    """The last session of each branch and when it was last used; `now` in monotonic seconds."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._last: dict[str, tuple[str, float]] = {}

    def superseded(self, session: str | None, now: float) -> list[str]:
        """Note a use of `session` (None: of none) and give the sessions to close now."""
        closed: list[str] = []
        if session is not None:
            branch = session.rpartition("@")[0]
            old, _ = self._last.pop(branch, (session, now))
            if old != session:
                closed.append(old)
            self._last[branch] = (session, now)
        for branch, (name, used_at) in list(self._last.items()):
            if used_at + self._lease_s > now:
                break
            closed.append(name)
            del self._last[branch]
        return closed
