"""`ei-hook`: a harness's hook on standard input, branch events to the broker.

It never stands in the harness's way: it ends with 0 after at most `EI_HOOK_TIMEOUT_S` (2) seconds, says nothing on
standard output, and complains on standard error only.
"""

import asyncio
import contextlib
import json
import math
import os
import sys
import threading

from .connection import Connection
from .events import DEFAULT_URL, branch_event
from .hook_input import read

_MAX_BYTES = 8 << 20
_HELP = """ei-hook: reads a hook's JSON on standard input and publishes the branch events it means.

Claude Code's hooks are understood (SessionStart, SubagentStart, SubagentStop, SessionEnd), and any
{"branch": "b", "type": "open|fork|subagent|compact|end|keepalive", "parent"?, "version"?}.

EI_NATS_URL        the broker (nats://127.0.0.1:4222)
EI_NATS_NKEY       seed, or file with one, where the broker wants a key
EI_PARTITION       p0
EI_HOOK_TIMEOUT_S  how long it may take (2)
"""


def main() -> int:
    """Entry point; the exit code is always 0."""
    if len(sys.argv) > 1:
        _complain(_HELP)
        return 0
    worker = threading.Thread(target=_work, daemon=True)
    worker.start()
    worker.join(_timeout_s())
    if worker.is_alive():
        _complain(f"ei-hook: gave up after {_timeout_s():g} s\n")
    os._exit(0)


def _timeout_s() -> float:
    try:
        given = float(os.environ.get("EI_HOOK_TIMEOUT_S", "2"))
    except ValueError:
        return 2.0
    return 2.0 if math.isnan(given) else min(max(given, 0.1), 60.0)


def _work() -> None:
    url = os.environ.get("EI_NATS_URL") or DEFAULT_URL
    if not url.startswith("ws"):
        sys.modules.setdefault("aiohttp", None)  # type: ignore[arg-type]  # nats-py would load it for websockets
    try:
        given = sys.stdin.buffer.read(_MAX_BYTES) if sys.stdin is not None else b""
        asyncio.run(_publish(url, json.loads(given)))
    except Exception as error:  # noqa: BLE001 - nothing of ours may look like a failure of the harness
        _complain(f"ei-hook: {' '.join(str(error).split()) or type(error).__name__}\n")


def _complain(text: str) -> None:
    """On standard error, if there is one."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(text)
            sys.stderr.flush()


async def _publish(url: str, given: object) -> None:
    connection = Connection(url, os.environ.get("EI_NATS_NKEY", ""))
    partition = os.environ.get("EI_PARTITION") or "p0"
    try:
        for said in read(given):
            event = branch_event(
                said.branch,
                said.kind,
                parent=said.parent,
                version=said.version,
                event_id=said.event_id,
                source="ei-hook",
                partition=partition,
            )
            await connection.publish(event)
    finally:
        await connection.close()


if __name__ == "__main__":
    main()
