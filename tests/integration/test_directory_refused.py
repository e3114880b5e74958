"""A directory that the broker does not let announce itself does not serve: nobody would stand by, or take over."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from directory_service import SUBJECTS, Connect, directory, sees, stats

from schemas.roles import Role, inbox
from services.broker import Broker, BrokerConfig, Member, users, write_keys
from services.bus import Bus, BusRefused

DIRECTORY, OPERATOR = Member(Role.DIRECTORY, "directory"), Member(Role.OPERATOR, "ei")
HEARTBEAT = SUBJECTS.telemetry_directory("directory-2")


class Guarded:
    """A broker with a key for `directory` and one for the operator."""

    def __init__(self, broker: Broker, keys: dict[Member, Path], connect: Connect) -> None:
        self.broker, self.keys, self._connect = broker, keys, connect

    async def bus(self, member: Member) -> Bus:
        seed = self.keys[member].read_text().strip()
        return await self._connect(self.broker.url, name=member.name, nkey_seed=seed, inbox=inbox(member.role))  # type: ignore[call-arg]


@pytest.fixture
def guarded(broker: Broker, tmp_path: Path, nats_connect: Connect) -> Guarded:
    keys = write_keys(tmp_path / "keys", [DIRECTORY, OPERATOR])
    broker.config = BrokerConfig(users=users(keys, SUBJECTS))
    broker.start()
    return Guarded(broker, keys, nats_connect)


async def test_one_whose_name_is_not_that_of_its_key_ends_and_names_both(guarded: Guarded) -> None:
    operator, key = await guarded.bus(OPERATOR), str(guarded.keys[DIRECTORY])
    async with directory(await guarded.bus(DIRECTORY), name="directory", nats_nkey=key):
        await sees(operator)
        first = (await stats(operator)).incarnation
        with pytest.raises(ExceptionGroup) as ended:
            async with asyncio.timeout(5), directory(await guarded.bus(DIRECTORY), name="directory-2", nats_nkey=key):
                pytest.fail("it serves")
        (cause,) = ended.value.exceptions
        assert isinstance(cause, BusRefused)
        assert f"publish to {HEARTBEAT}" in str(cause)
        assert key in str(cause)
        assert {(await stats(operator)).incarnation for _ in range(5)} == {first}


async def mute(guarded: Guarded, heartbeat: str) -> None:
    """From now on nobody may publish this subject."""
    before = guarded.broker.config
    assert before.users is not None
    muted = {
        public: granted._replace(publish=[subject for subject in granted.publish if subject != heartbeat])
        for public, granted in before.users.items()
    }
    guarded.broker.reload(replace(before, users=muted))


async def served_until_muted(guarded: Guarded) -> None:
    operator = await guarded.bus(OPERATOR)
    async with directory(await guarded.bus(DIRECTORY), name="directory"):
        await sees(operator)
        await mute(guarded, SUBJECTS.telemetry_directory("directory"))
        await asyncio.sleep(4)


async def test_one_that_may_not_announce_itself_any_more_ends(guarded: Guarded) -> None:
    with pytest.raises(ExceptionGroup) as ended:
        await served_until_muted(guarded)
    (cause,) = ended.value.exceptions
    assert isinstance(cause, BusRefused)
