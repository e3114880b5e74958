"""What systemd wants to hear: readiness, stopping, and that we live."""

import asyncio
import os
import socket
from collections.abc import Mapping


def notify(state: str, environ: Mapping[str, str] = os.environ) -> None:
    """Send `state` (READY=1, STOPPING=1, WATCHDOG=1) to NOTIFY_SOCKET, if there is one."""
    path = environ.get("NOTIFY_SOCKET", "")
    if not path:
        return
    address = "\0" + path[1:] if path.startswith("@") else path
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.connect(address)
        sender.sendall(state.encode())


def watchdog_s(environ: Mapping[str, str] = os.environ, pid: int | None = None) -> float | None:
    """How often to say WATCHDOG=1: half of what the supervisor grants us; None when it does not ask."""
    granted_us = environ.get("WATCHDOG_USEC", "")
    if not granted_us.isdigit() or environ.get("WATCHDOG_PID", str(pid or os.getpid())) != str(pid or os.getpid()):
        return None
    return int(granted_us) / 2e6


async def watchdog(environ: Mapping[str, str] = os.environ) -> None:
    """Tell the supervisor that the loop turns, for as long as it wants to know."""
    every_s = watchdog_s(environ)
    while every_s is not None:
        notify("WATCHDOG=1", environ)
        await asyncio.sleep(every_s)
