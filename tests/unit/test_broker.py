"""The broker's keys, configuration and process."""

import contextlib
import json
import os
import select
import signal
import stat
from pathlib import Path

import nkeys
import pytest

from schemas.roles import Grant, Role, grant
from schemas.subjects import Subjects
from services.broker import Broker, BrokerConfig, BrokerError, Member, config_text, find_server, users, write_keys

SUBJECTS = Subjects()
ENGINE, ROUTER = Member(Role.ENGINE, "node-0"), Member(Role.ROUTER, "r0")


def test_keys_are_fresh_and_readable_by_us_only(tmp_path: Path) -> None:
    paths = write_keys(tmp_path / "keys", [ENGINE, ROUTER])
    assert sorted(path.name for path in paths.values()) == ["engine-node-0.nk", "router-r0.nk"]
    seeds = {path.read_text().strip() for path in paths.values()}
    assert len(seeds) == 2
    assert all(nkeys.from_seed(bytearray(seed.encode())).public_key.startswith(b"U") for seed in seeds)
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths.values()} == {0o600}
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o700


def test_users_are_the_public_keys_with_the_grants_of_their_roles(tmp_path: Path) -> None:
    found = users(write_keys(tmp_path, [ENGINE]), SUBJECTS)
    ((public, granted),) = found.items()
    assert public.startswith("U")
    assert granted == grant(Role.ENGINE, SUBJECTS, "node-0")


def test_the_configuration_holds_no_seed_and_every_permission(tmp_path: Path) -> None:
    keys = write_keys(tmp_path, [ENGINE])
    config = BrokerConfig(users=users(keys, SUBJECTS), anonymous=grant(Role.ANONYMOUS, SUBJECTS))
    text = config_text(config, tmp_path / "store")
    assert keys[ENGINE].read_text().strip() not in text
    written = json.loads(text)
    engine, anonymous = written["authorization"]["users"]
    assert engine["permissions"]["publish"]["allow"] == grant(Role.ENGINE, SUBJECTS, "node-0").publish
    assert engine["permissions"]["allow_responses"]["max"] == 1
    assert "allow_responses" not in anonymous["permissions"]
    assert written["no_auth_user"] == anonymous["user"]
    assert written["max_payload"] == 8 << 20


def test_without_loopback_nobody_comes_in_without_a_key(tmp_path: Path) -> None:
    anonymous = Grant(["x"], ["y"], responds=False)
    written = json.loads(config_text(BrokerConfig(host="0.0.0.0", users={}, anonymous=anonymous), tmp_path))
    assert "no_auth_user" not in written
    assert written["authorization"]["users"] == []


def test_it_comes_back_on_the_same_port(broker: Broker) -> None:
    url = broker.start()
    first = broker.pid
    broker.kill()
    assert not broker.running
    assert broker.start() == url
    assert broker.pid != first
    broker.stop()
    assert not broker.running


def test_it_leaves_half_of_the_cores_to_its_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for said, expected in ((None, str(max(1, len(os.sched_getaffinity(0)) // 2))), ("7", "7")):
        if said is None:
            monkeypatch.delenv("GOMAXPROCS", raising=False)
        else:
            monkeypatch.setenv("GOMAXPROCS", said)
        broker = Broker(tmp_path)
        broker.start()
        try:
            environ = Path(f"/proc/{broker.pid}/environ").read_bytes().split(b"\0")
            assert [entry for entry in environ if entry.startswith(b"GOMAXPROCS=")] == [
                f"GOMAXPROCS={expected}".encode()
            ]
        finally:
            broker.kill()


def test_a_broker_that_cannot_start_says_why(tmp_path: Path, broker: Broker) -> None:
    broker.start()
    second = Broker(tmp_path / "second", BrokerConfig(port=broker.port))
    with pytest.raises(BrokerError, match=r"ended with 1: (.|\n)*address already in use"):
        second.start()
    assert not second.running


def test_it_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        broker = Broker(tmp_path / "broker")
        broker.start()
        os.write(writer, str(broker.pid).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    pid = int(os.read(reader, 32))
    os.close(reader)
    os.close(writer)
    with contextlib.suppress(ProcessLookupError):
        orphan = os.pidfd_open(pid)
        ended, _, _ = select.select([orphan], [], [], 5)
        os.close(orphan)
        assert ended, f"nats-server {pid} outlived its parent"


def test_a_server_may_be_named_by_the_environment() -> None:
    assert find_server({"NATS_SERVER_BIN": "/opt/nats-server"}) == "/opt/nats-server"
    assert Path(find_server({})).name == "nats-server"
