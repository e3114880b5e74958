"""Live progress: one line that changes on a terminal, a line now and then elsewhere."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from rich.console import Console
from rich.live import Live
from rich.text import Text

_REFRESH_S = 0.25
_LINE_EVERY_S = 15.0


@asynccontextmanager
async def progress(console: Console, line: Callable[[], str]) -> AsyncIterator[None]:
    """Show what `line` says for as long as the `with` lasts; what is printed meanwhile stands above it."""
    showing = asyncio.ensure_future(_on_terminal(console, line) if console.is_terminal else _in_log(console, line))
    try:
        yield
    finally:
        showing.cancel()
        await asyncio.wait([showing])


async def _on_terminal(console: Console, line: Callable[[], str]) -> None:
    with Live(console=console, transient=True, auto_refresh=False) as live:
        while True:
            live.update(Text(line()), refresh=True)
            await asyncio.sleep(_REFRESH_S)


async def _in_log(console: Console, line: Callable[[], str]) -> None:
    due = time.monotonic() + _LINE_EVERY_S
    while True:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        console.print(Text(line()))
        due += _LINE_EVERY_S
