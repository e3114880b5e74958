"""`ei tail` where the broker does not let it listen: it says so instead of waiting in silence."""

import asyncio
from pathlib import Path

import pytest

from schemas.roles import Role, grant
from schemas.subjects import Subjects
from services.broker import Broker, BrokerConfig, Member, users, write_keys
from services.cli.connection import CommandError, Target
from services.cli.tail import Filter, tail


async def test_a_key_that_may_not_listen_is_an_error(broker: Broker, tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys", [Member(Role.OPERATOR, "operator")])
    broker.config = BrokerConfig(users=users(keys, Subjects()), anonymous=grant(Role.ANONYMOUS, Subjects()))
    target = Target("", broker.start(), "", "p0")
    with pytest.raises(CommandError, match=r"EI_NATS_NKEY") as refused:
        await asyncio.wait_for(tail(target, "branch", Filter()), 20)
    assert "no permission to subscribe to ei.p0.branch" in str(refused.value)
