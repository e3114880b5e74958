"""Who may say what, against a real broker with the permissions of the roles."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from schemas.roles import Role, grant, inbox
from schemas.streams import Stream, branch_stream, phase_stream
from schemas.subjects import Subjects
from services.broker import Broker, BrokerConfig, Member, users, write_keys
from services.bus import BusRefused, Delivery, NatsBus
from tests.conftest import Connect
from tests.contract.test_bus import Collector

SUBJECTS = Subjects()
ROUTER, PLANNER = Member(Role.ROUTER, "r0"), Member(Role.PLANNER, "planner")
DIRECTORY, OPERATOR = Member(Role.DIRECTORY, "directory"), Member(Role.OPERATOR, "ei")
ENGINE, OTHER, POOL = Member(Role.ENGINE, "node-0"), Member(Role.ENGINE, "node-1"), Member(Role.KVPOOL, "node-0")
MEMBERS = [ROUTER, PLANNER, DIRECTORY, OPERATOR, ENGINE, OTHER, POOL]


class Cluster:
    """A broker with a key for each member."""

    def __init__(self, broker: Broker, keys: dict[Member, Path], connect: Connect) -> None:
        self.broker, self._keys, self._connect = broker, keys, connect

    async def bus(self, member: Member) -> NatsBus:
        seed = self._keys[member].read_text().strip()
        name = f"{member.role}-{member.name}"
        return await self._connect(self.broker.url, name=name, nkey_seed=seed, inbox=inbox(member.role))

    async def anonymous(self) -> NatsBus:
        return await self._connect(self.broker.url)


@pytest.fixture
def cluster(broker: Broker, tmp_path: Path, nats_connect: Connect) -> Cluster:
    keys = write_keys(tmp_path / "keys", MEMBERS)
    broker.config = BrokerConfig(users=users(keys, SUBJECTS), anonymous=grant(Role.ANONYMOUS, SUBJECTS))
    broker.start()
    return Cluster(broker, keys, nats_connect)


async def echo(delivery: Delivery) -> bytes:
    return delivery.data


async def ensure(bus: NatsBus, stream: Stream) -> None:
    await bus.ensure_stream(
        stream.name, stream.subjects, max_age_s=stream.max_age_s, last_per_subject=stream.last_per_subject
    )


async def refused(bus: NatsBus) -> list[str]:
    """What the broker has refused so far: waits at most the 2 s in which it must be known."""
    async with asyncio.timeout(2):
        while not bus.refusals():
            await asyncio.sleep(0.005)
    return bus.refusals()


async def test_case_49_a_refused_publish_is_named(cluster: Cluster) -> None:
    engine = await cluster.bus(ENGINE)
    await engine.publish(SUBJECTS.telemetry_node("node-0"), b"")
    await engine.publish(SUBJECTS.kv_location("node-0"), b"")
    assert await refused(engine) == ["no permission to publish to ei.p0.kv.location.node-0"]
    assert engine.stats.refused == 1
    assert engine.connected


async def test_case_49_a_refused_subscription_is_named(cluster: Cluster) -> None:
    engine = await cluster.bus(ENGINE)
    await engine.subscribe(SUBJECTS.kv_location("*"), Collector())
    assert await refused(engine) == ["no permission to subscribe to ei.p0.kv.location.*"]


async def test_a_refused_request_fails_at_once_with_the_subject(cluster: Cluster) -> None:
    engine = await cluster.bus(ENGINE)
    with pytest.raises(BusRefused, match=r"publish to ei\.p0\.query\.planner\.split"):
        await asyncio.wait_for(engine.request(SUBJECTS.query_planner("split"), b"", 30), 1)


async def test_case_49_permissions_may_change_at_run_time(cluster: Cluster) -> None:
    """Taken away: noticed with the next heartbeat. Given back: the subscription is in force again by itself."""
    engine, router = await cluster.bus(ENGINE), await cluster.bus(ROUTER)
    heartbeat, serve = SUBJECTS.telemetry_node("node-0"), SUBJECTS.serve("node-0")
    await engine.respond(serve, echo)
    assert await router.request(serve, b"1", 1) == b"1"
    before = cluster.broker.config
    assert before.users is not None
    muted = {
        key: g._replace(
            publish=[s for s in g.publish if s != heartbeat], subscribe=[s for s in g.subscribe if s != serve]
        )
        for key, g in before.users.items()
    }
    cluster.broker.reload(replace(before, users=muted))
    async with asyncio.timeout(5):
        while len(engine.refusals()) < 2:
            await engine.publish(heartbeat, b"")
            await asyncio.sleep(0.02)
    assert sorted(engine.refusals()) == [
        "no permission to publish to ei.p0.telemetry.node.node-0",
        "no permission to subscribe to ei.p0.serve.node-0",
    ]
    cluster.broker.reload(before)
    async with asyncio.timeout(10):
        while "no permission to subscribe to ei.p0.serve.node-0" in engine.refusals():
            await asyncio.sleep(0.05)
    assert await router.request(serve, b"2", 1) == b"2"


async def test_a_key_the_broker_does_not_know_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    stranger = write_keys(tmp_path / "other", [ROUTER])[ROUTER].read_text().strip()
    with pytest.raises(BusRefused, match="does not accept router: check its nkey"):
        await NatsBus.connect(cluster.broker.url, name="router", nkey_seed=stranger, timeout_s=5)


# nats-py leaves the socket of each refused try to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_a_key_taken_away_is_told_until_it_is_given_back(cluster: Cluster) -> None:
    engine = await cluster.bus(ENGINE)
    before = cluster.broker.config
    assert before.users is not None
    kept = {key: g for key, g in before.users.items() if SUBJECTS.serve("node-0") not in g.subscribe}
    cluster.broker.reload(replace(before, users=kept))
    async with asyncio.timeout(10):
        while not engine.refusals():
            await asyncio.sleep(0.01)
    assert engine.refusals() == ["the broker does not accept our key"]
    assert not engine.connected
    cluster.broker.reload(before)
    async with asyncio.timeout(10):
        while not engine.connected:
            await asyncio.sleep(0.01)
    assert engine.refusals() == []


async def test_replies_reach_only_the_role_that_asked(cluster: Cluster) -> None:
    router, engine, spy = await cluster.bus(ROUTER), await cluster.bus(ENGINE), await cluster.anonymous()
    heard = Collector()
    await spy.subscribe("_INBOX.*.*", heard)
    await engine.respond(SUBJECTS.serve("node-0"), echo)
    assert await router.request(SUBJECTS.serve("node-0"), b"secret", 1) == b"secret"
    for pattern in ("_INBOX.>", "_INBOX.router.>", "_INBOX.*.*.*", "ei.>", ">"):
        await spy.subscribe(pattern, heard)
    assert "no permission to subscribe to >" in spy.refusals()
    assert await router.request(SUBJECTS.serve("node-0"), b"secret", 1) == b"secret"
    assert heard.data == []
    assert spy.connected


async def test_without_a_key_only_branch_events_of_the_default_tenant_may_be_said(cluster: Cluster) -> None:
    directory, anonymous = await cluster.bus(DIRECTORY), await cluster.anonymous()
    await ensure(directory, branch_stream(SUBJECTS))
    came = Collector()
    await directory.follow(SUBJECTS.branch_events(), came, start="all")
    assert await anonymous.store(SUBJECTS.branch_event("b1"), b"{}", "e1") == 1
    assert await came.wait_for(1) == [b"{}"]
    with pytest.raises(BusRefused, match="publish"):
        await anonymous.store(SUBJECTS.branch_event("b1", "acme"), b"{}", "e2")
    with pytest.raises(BusRefused, match=r"publish to ei\.p0\.phase\.command\.node-0"):
        await anonymous.store(SUBJECTS.phase_command("node-0"), b"", "e3")
    with pytest.raises(BusRefused):
        await anonymous.request("$SRV.PING", b"", 1)


async def test_only_the_planner_commands_and_engines_speak_for_themselves(cluster: Cluster) -> None:
    planner, engine, router = await cluster.bus(PLANNER), await cluster.bus(ENGINE), await cluster.bus(ROUTER)
    await ensure(planner, phase_stream(SUBJECTS))
    came = Collector()
    await engine.follow(SUBJECTS.phase_command("node-0"), came, start="last_per_subject")
    await planner.store(SUBJECTS.phase_command("node-0"), b"go", "c1")
    assert await came.wait_for(1) == [b"go"]
    with pytest.raises(BusRefused):
        await router.store(SUBJECTS.phase_command("node-0"), b"no", "c2")
    await engine.publish(SUBJECTS.telemetry_node("node-1"), b"")
    assert await refused(engine) == ["no permission to publish to ei.p0.telemetry.node.node-1"]


async def test_a_durable_reader_needs_no_more_than_its_role(cluster: Cluster) -> None:
    router, directory = await cluster.bus(ROUTER), await cluster.bus(DIRECTORY)
    await ensure(directory, branch_stream(SUBJECTS))
    came = Collector()
    await directory.follow(SUBJECTS.branch_events(), came, start="all", durable="directory")
    for number in range(3):
        await router.store(SUBJECTS.branch_event("b"), b"%d" % number, f"e{number}")
    assert await came.wait_for(3) == [b"0", b"1", b"2"]
    assert directory.refusals() == router.refusals() == []


async def test_the_operator_hears_everything_and_asks_services(cluster: Cluster) -> None:
    operator, planner, pool = await cluster.bus(OPERATOR), await cluster.bus(PLANNER), await cluster.bus(POOL)
    heard = Collector()
    await operator.subscribe("ei.p0.>", heard)
    await planner.respond(SUBJECTS.query_planner("mode"), echo)
    await planner.respond("$SRV.PING", echo)
    assert await operator.request(SUBJECTS.query_planner("mode"), b"on", 1) == b"on"
    assert await operator.request("$SRV.PING", b"", 1) == b""
    await pool.publish(SUBJECTS.kv_location("node-0"), b"x")
    await heard.wait_for(2)
    assert operator.refusals() == planner.refusals() == pool.refusals() == []
