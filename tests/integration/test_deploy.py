"""Compose and systemd start what the catalogue says; their commands run as processes on a real broker and serve."""

import asyncio
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.cli.config import Deployment, specs_of, write_config

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "compose"
UNITS = ROOT / "deploy" / "systemd"
BIN = Path(sys.executable).parent
NODES = 3
READY_S = 60.0


def compose_services() -> dict[str, dict[str, Any]]:
    services: dict[str, dict[str, Any]] = yaml.safe_load((COMPOSE / "compose.yaml").read_text())["services"]
    return services


def unit(name: str, instance: str = "") -> dict[str, list[str]]:
    """Every directive of a unit with its values, `%i` and `%d` filled in."""
    found: dict[str, list[str]] = {}
    for line in (UNITS / name).read_text().splitlines():
        key, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            credentials = f"/run/credentials/{name.replace('@', f'@{instance}')}"
            found.setdefault(key, []).append(value.replace("%i", instance).replace("%d", credentials))
    return found


def commands_of_units() -> dict[str, list[str]]:
    """The command of every service on a machine with three nodes."""
    commands = {
        kind: shlex.split(unit(f"ei-{kind}.service")["ExecStart"][0]) for kind in ("router", "planner", "directory")
    }
    for index in range(NODES):
        for kind in ("kvpool", "engine"):
            node = f"node-{index}"
            commands[f"{kind}-{node}"] = shlex.split(unit(f"ei-{kind}@.service", node)["ExecStart"][0])
    return commands


@pytest.mark.parametrize(("deployment", "folder"), [("compose", COMPOSE), ("systemd", UNITS)])
def test_committed_settings_are_those_of_the_catalogue(deployment: str, folder: Path, tmp_path: Path) -> None:
    fresh = write_config(Deployment(deployment), NODES, tmp_path)
    assert {path.name: path.read_text() for path in fresh} == {
        path.name: path.read_text() for path in (folder / "config").iterdir()
    }


def test_compose_starts_every_service_of_the_catalogue() -> None:
    commands = {name: service["command"] for name, service in compose_services().items()}
    for spec in specs_of(Deployment.COMPOSE, NODES):
        assert commands[spec.label] == [spec.command, "--config", f"/etc/evolving-infra/{spec.file}"]
    extra = set(commands) - {spec.label for spec in specs_of(Deployment.COMPOSE, NODES)}
    assert extra == {"keys", "broker", "replay"}


def test_compose_looks_for_readiness_where_each_service_listens() -> None:
    services = compose_services()
    for spec in specs_of(Deployment.COMPOSE, NODES):
        assert services[spec.label]["environment"]["PORT"] == str(spec.settings["http_port"])
        assert "/ready" in services[spec.label]["healthcheck"]["test"][3]


def test_units_start_every_service_of_the_catalogue() -> None:
    commands = commands_of_units()
    specs = specs_of(Deployment.SYSTEMD, NODES)
    assert set(commands) == {spec.label for spec in specs}
    for spec in specs:
        assert commands[spec.label] == [
            f"/opt/evolving-infra/bin/{spec.command}",
            "--config",
            f"/etc/evolving-infra/{spec.file}",
        ]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed here")
def test_systemd_understands_the_units(tmp_path: Path) -> None:
    for path in UNITS.glob("ei*"):
        text = path.read_text().replace("/opt/evolving-infra/bin", str(BIN)).replace("User=evolving-infra", "User=root")
        (tmp_path / path.name.replace("@.", "@node-0.")).write_text(text)
    files = sorted(str(path) for path in tmp_path.iterdir())
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *files], capture_output=True, text=True, timeout=60, check=False
    )
    about_ours = [line for line in checked.stderr.splitlines() if str(tmp_path) in line or "ei-" in line]
    assert about_ours == []


@dataclass
class Site:
    """A machine made of a temporary folder: absolute paths of the deployment lie below it."""

    root: Path
    environ: dict[str, str] = field(default_factory=dict)
    processes: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    def moved(self, text: str) -> str:
        for path in ("/etc/evolving-infra", "/var/lib/evolving-infra", "/run/evolving-infra", "/dev/shm"):
            text = text.replace(path, f"{self.root}{path}")
        return text

    def prepare(self, config: Path) -> None:
        for path in ("etc/evolving-infra", "var/lib/evolving-infra/state", "run/evolving-infra", "dev/shm", "ports"):
            (self.root / path).mkdir(parents=True)
        for file in config.iterdir():
            (self.root / "etc/evolving-infra" / file.name).write_text(self.moved(file.read_text()))

    def start(self, name: str, command: list[str], **environ: str) -> None:
        program = BIN / Path(command[0]).name
        log = (self.root / f"{name}.log").open("wb")
        with log:
            self.processes[name] = subprocess.Popen(
                [str(program), *(self.moved(word) for word in command[1:])],
                env=dict(os.environ, **self.environ, **environ),
                stdout=log,
                stderr=log,
                cwd=self.root,
            )

    def port(self, name: str) -> int | None:
        path = self.root / "ports" / f"{name}.http"
        return int(path.read_text()) if path.exists() else None

    def get(self, name: str, path: str) -> tuple[int, Any]:
        port = self.port(name)
        if port is None:
            return 0, None
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, None
        except OSError:
            return 0, None

    async def until_ready(self, names: list[str]) -> None:
        async with asyncio.timeout(READY_S):
            while waiting := [name for name in names if (await asyncio.to_thread(self.get, name, "/ready"))[0] != 200]:
                for name, process in self.processes.items():
                    log = (self.root / f"{name}.log").read_text()
                    assert process.poll() is None, f"{name} ended with {process.returncode}: {log[-2000:]}"
                assert waiting
                await asyncio.sleep(0.1)

    def stop(self) -> dict[str, int]:
        """Everything but the broker first, as an operator would; the exit codes."""
        for name, process in self.processes.items():
            if name != "broker":
                process.send_signal(signal.SIGTERM)
        codes = {name: process.wait(30) for name, process in self.processes.items() if name != "broker"}
        self.processes["broker"].send_signal(signal.SIGTERM)
        return codes | {"broker": self.processes["broker"].wait(10)}


@contextmanager
def site(root: Path) -> Iterator[Site]:
    made = Site(root)
    try:
        yield made
    finally:
        for process in made.processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()


def broker_of(one: Site, folder: Path, keys: list[str]) -> None:
    """Run the deployment's own `ei keys`, and its broker on a port of the test's own."""
    made = subprocess.run(
        [str(BIN / keys[0]), *(one.moved(word) for word in keys[1:])], capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr
    path = Path(one.moved(str(folder))) / "nats.conf"
    settings = json.loads(path.read_text())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        settings["port"] = probe.getsockname()[1]
    assert "authorization" in settings
    path.write_text(json.dumps(settings | {"host": "127.0.0.1"}))
    one.environ = {
        "EI_NATS_URL": f"nats://127.0.0.1:{settings['port']}",
        "EI_HTTP_PORT": "0",
        "EI_HTTP_HOST": "127.0.0.1",
        "EI_PORTS_DIR": str(one.root / "ports"),
    }


def ask(one: Site) -> dict[str, Any]:
    body = {"prompt": list(range(40, 100)), "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{one.port('r0')}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=20) as answer:
        reply: dict[str, Any] = json.load(answer)
    return reply


async def serves(one: Site, names: list[str]) -> None:
    await one.until_ready(names)
    async with asyncio.timeout(20):
        while len((await asyncio.to_thread(one.get, "r0", "/v1/cluster"))[1]["nodes"]) < NODES:
            await asyncio.sleep(0.1)
    reply = await asyncio.to_thread(ask, one)
    assert len(reply["choices"][0]["token_ids"]) == 8
    refused = [log for log in one.root.glob("*.log") if "ermissions violation" in log.read_text()]
    assert refused == []
    codes = await asyncio.to_thread(one.stop)
    assert set(codes.values()) == {0}, codes


@pytest.mark.timeout(180)
async def test_the_commands_of_compose_serve_a_request(tmp_path: Path) -> None:
    services = compose_services()
    with site(tmp_path) as one:
        one.prepare(COMPOSE / "config")
        broker_of(one, Path("/var/lib/evolving-infra/broker"), services["keys"]["command"])
        one.start("broker", services["broker"]["command"])
        names = []
        for spec in specs_of(Deployment.COMPOSE, NODES):
            one.start(spec.label, services[spec.label]["command"])
            names.append(spec.name)
        await serves(one, names)


@pytest.mark.timeout(180)
async def test_the_commands_of_the_units_serve_a_request_and_say_when_they_are_ready(tmp_path: Path) -> None:
    commands = commands_of_units()
    nodes = ",".join(f"node-{index}" for index in range(NODES))
    store = "/var/lib/evolving-infra/nats"
    with site(tmp_path) as one, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
        one.prepare(UNITS / "config")
        notified.bind(str(tmp_path / "notify"))
        notified.settimeout(READY_S)
        broker_of(
            one, Path("/etc/evolving-infra"), ["ei", "keys", "/etc/evolving-infra", "--nodes", nodes, "--store", store]
        )
        one.start("broker", shlex.split(unit("ei-broker.service")["ExecStart"][0]))
        names = []
        for spec in specs_of(Deployment.SYSTEMD, NODES):
            instance = spec.settings.get("node", "")
            of = unit(f"ei-{spec.kind}@.service" if instance else f"ei-{spec.kind}.service", instance)
            assert of["Type"] == ["notify"]
            assert of["Environment"][0].startswith("EI_NATS_NKEY=/run/credentials/")
            _, _, seed = of["LoadCredential"][0].partition(":")
            one.start(
                spec.label,
                commands[spec.label],
                EI_NATS_NKEY=one.moved(seed),
                NOTIFY_SOCKET=str(tmp_path / "notify"),
            )
            names.append(spec.name)
        ready = 0
        while ready < len(names):
            ready += (await asyncio.to_thread(notified.recv, 256)).startswith(b"READY=1")
        await serves(one, names)
