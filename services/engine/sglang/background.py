"""A thread that runs jobs one after the other and keeps their order of completion."""

import logging
import threading
from collections import deque
from collections.abc import Callable

_log = logging.getLogger(__name__)


class JobThread:
    """Jobs are functions without arguments; `take_done` gives results in the order the jobs were put.

    A job that raises counts as failed (False): SGLang's own threads would die for ever, this one goes on.
    """

    def __init__(self, name: str) -> None:
        self._jobs: deque[Callable[[], bool]] = deque()
        self._done: deque[bool] = deque()
        self._wake = threading.Condition()
        self._running = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def pending(self) -> int:
        """Jobs put and not done yet."""
        with self._wake:
            return len(self._jobs) + self._running

    @property
    def completed(self) -> int:
        """Results waiting to be taken."""
        return len(self._done)

    def put(self, job: Callable[[], bool]) -> None:
        """Run `job` after all that were put before."""
        with self._wake:
            self._jobs.append(job)
            self._wake.notify_all()

    def take_done(self) -> bool:
        """The oldest result; IndexError if there is none."""
        return self._done.popleft()

    def quiesce(self) -> None:
        """Forget jobs that have not begun, wait for the running one, drop all results."""
        with self._wake:
            self._jobs.clear()
            self._wake.wait_for(lambda: not self._running)
            self._done.clear()

    def close(self) -> None:
        """Quiesce and end the thread."""
        self.quiesce()
        with self._wake:
            self._closed = True
            self._wake.notify_all()

    def _run(self) -> None:
        while True:
            with self._wake:
                self._running = 0
                self._wake.notify_all()
                self._wake.wait_for(lambda: self._jobs or self._closed)
                if self._closed:
                    return
                job = self._jobs.popleft()
                self._running = 1
            try:
                result = job()
            except Exception:  # noqa: BLE001 (whatever a copy raises, the next one must run)
                _log.exception("a background copy failed")
                result = False
            self._done.append(result)
