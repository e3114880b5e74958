"""Where the cluster of a command is: its HTTP address, its broker, and the key to it."""

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from schemas.subjects import DEFAULT_PARTITION
from services.bus import BusError, NatsBus
from services.cli.cluster.rundir import read_state, run_path
from services.observe import logger
from services.settings import SettingsError, read_seed

DEFAULT_PORT = 8000
DEFAULT_NATS = "nats://127.0.0.1:4222"
_CONNECT_S = 5.0


class CommandError(Exception):
    """A command that cannot be carried out; the text is for whoever typed it."""


@dataclass(frozen=True, slots=True)
class Target:
    """A cluster to talk to. `nkey`: seed, or path of a file with one, or "" for none."""

    url: str
    nats_url: str
    nkey: str
    partition: str

    @classmethod
    def find(cls, port: int | None, url: str | None, nats: str | None, environ: Mapping[str, str]) -> "Target":
        """What was given, else EI_URL, EI_NATS_URL and EI_NATS_NKEY, else the local cluster on `port` (8000)."""
        state = read_state(run_path(port if port is not None else DEFAULT_PORT))
        local_url = f"http://127.0.0.1:{port if port is not None else DEFAULT_PORT}"
        named = url or environ.get("EI_URL")
        return cls(
            url=(named or (state.url if state is not None else local_url)).rstrip("/"),
            nats_url=nats or environ.get("EI_NATS_URL") or (state.nats_url if state is not None else DEFAULT_NATS),
            nkey=environ.get("EI_NATS_NKEY") or (state.nkey if state is not None else ""),
            partition=environ.get("EI_PARTITION") or (state.partition if state is not None else DEFAULT_PARTITION),
        )

    @asynccontextmanager
    async def bus(self) -> AsyncIterator[NatsBus]:
        """A connection to the broker; CommandError names it when there is none."""
        try:
            bus = await NatsBus.connect(
                self.nats_url,
                name="ei",
                nkey_seed=read_seed(self.nkey),
                timeout_s=_CONNECT_S,
                log=logger("ei", level="error"),
            )
        except (BusError, SettingsError) as error:
            raise CommandError(f"no broker at {self.nats_url}: {error}") from error
        try:
            yield bus
        finally:
            await bus.close()


def find_target(port: int | None = None, url: str | None = None, nats: str | None = None) -> Target:
    """`Target.find` with this process's environment."""
    return Target.find(port, url, nats, os.environ)
