"""A minimal service as a process, for the tests of what every service process does."""

import asyncio
import sys
from typing import ClassVar

from starlette.routing import BaseRoute

from services.app import App, command
from services.bus import Delivery
from services.settings import ServiceSettings


class DemoSettings(ServiceSettings, kw_only=True):
    service: ClassVar[str] = "demo"

    drain_takes_s: float = 0.0


class Demo:
    """Echoes, crashes when told to, drains as long as its settings say."""

    def __init__(self, app: App[DemoSettings]) -> None:
        self._app = app

    async def start(self) -> None:
        await self._app.bus.respond(f"demo.{self._app.settings.name}", self._echo)
        await self._app.bus.subscribe("demo.crash", self._crash)
        await self._app.bus.publish("demo.hello", self._app.settings.name.encode())

    async def _echo(self, delivery: Delivery) -> bytes:
        return delivery.data

    async def _crash(self, delivery: Delivery) -> None:
        raise AssertionError("told to crash")

    def not_ready(self) -> list[str]:
        return []

    def routes(self) -> list[BaseRoute]:
        return []

    async def drain(self) -> None:
        await asyncio.sleep(self._app.settings.drain_takes_s)

    async def stop(self) -> None:
        self._app.log.info("demo_stopped")


if __name__ == "__main__":
    sys.exit(command(DemoSettings, Demo))
