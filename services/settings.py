"""Settings of a service: a TOML file, environment variables over it, every mistake named."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import msgspec

from schemas.subjects import DEFAULT_PARTITION, NAME

ENVIRONMENT_PREFIX = "EI_"
_SECRET = ("nkey", "password", "secret", "token", "key")


class SettingsError(Exception):
    """A setting that cannot be used; the text names key, value and what was expected."""


class ServiceSettings(msgspec.Struct, kw_only=True):
    """What every service needs to know.

    `nats_url` may list several servers, separated by commas. `nats_nkey` is a seed, the path of a file with one, or
    empty for none. `http_port` 0 takes any free one; with `ports_dir` it is published there as `<name>.http`.
    A drain is cut short after `drain_s`, the clean-up that follows it after `stop_s`.
    """

    service: ClassVar[str] = "service"

    name: str = ""
    nats_url: str = "nats://127.0.0.1:4222"
    nats_nkey: str = ""
    nats_tls_ca: str = ""
    partition: str = DEFAULT_PARTITION
    http_host: str = "127.0.0.1"
    http_port: int = 0
    ports_dir: str = ""
    log_level: str = "info"
    debug_checks: bool = False
    drain_s: float = 30.0
    stop_s: float = 30.0

    def __post_init__(self) -> None:
        if not self.name:
            self.name = self.service
        for key, value in (("name", self.name), ("partition", self.partition)):
            if not NAME.match(value):
                raise ValueError(f"`{key}` {value!r} does not match [a-z0-9-]{{1,63}}")
        if self.log_level not in ("debug", "info", "warning", "error"):
            raise ValueError(f"`log_level` {self.log_level!r} is not one of debug, info, warning, error")
        if not 0 <= self.http_port <= 65_535:
            raise ValueError(f"`http_port` {self.http_port} is not in 0..65535")
        for key, seconds in (("drain_s", self.drain_s), ("stop_s", self.stop_s)):
            if seconds < 0:
                raise ValueError(f"`{key}` {seconds} is negative")


SettingsT = TypeVar("SettingsT", bound=ServiceSettings)


def load(kind: type[SettingsT], path: Path | None, environ: Mapping[str, str]) -> SettingsT:
    """Read `path` (TOML), put `EI_<FIELD>` (`EI_A__B` for field b of table a) over it; SettingsError names mistakes.

    Lists, tables and the like are given as JSON in the environment. Keys of the file that no field takes are mistakes;
    `EI_` variables that no field takes belong to other programs.
    """
    raw = _read(path) if path is not None else {}
    _check_known(kind, raw, "")
    _overlay(kind, raw, environ, ENVIRONMENT_PREFIX, "")
    try:
        return msgspec.convert(raw, kind, strict=True)
    except (msgspec.ValidationError, ValueError) as error:
        raise SettingsError(_explained(kind, raw, str(error))) from error


def read_seed(nkey: str) -> str | None:
    """The seed that `nats_nkey` gives: itself, or what its file holds; None for "". SettingsError names the path."""
    if not nkey:
        return None
    if nkey.startswith("SU") and "/" not in nkey:
        return nkey
    try:
        seed = Path(nkey).read_text().strip()
    except OSError as error:
        raise SettingsError(f"nats_nkey: cannot read the seed file {nkey!r}: {error.strerror}") from error
    if not seed.startswith("SU"):
        raise SettingsError(f"nats_nkey: {nkey!r} does not hold a user seed (SU...)")
    return seed


def seed_named(nkey: str) -> str:
    """Where the seed of `nats_nkey` is, for an error text: never the seed itself."""
    if not nkey:
        return "none (nats_nkey)"
    return "given in nats_nkey" if nkey.startswith("SU") and "/" not in nkey else nkey


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not TOML: {error}") from error


def _fields(kind: Any) -> dict[str, Any]:
    return {f.encode_name: f.type for f in msgspec.structs.fields(kind)}


def _table(kind: Any) -> Any | None:
    """The struct type inside `kind` (itself or one arm of a union), None for anything else."""
    arms = (kind, *getattr(kind, "__args__", ()))
    return next((a for a in arms if isinstance(a, type) and issubclass(a, msgspec.Struct)), None)


def _check_known(kind: Any, raw: Mapping[str, Any], where: str) -> None:
    fields = _fields(kind)
    for key, value in raw.items():
        if key not in fields:
            raise SettingsError(f"unknown setting {where}{key} = {_shown(key, value)}; known are {', '.join(fields)}")
        table = _table(fields[key])
        if table is not None and isinstance(value, dict) and getattr(fields[key], "__origin__", None) is None:
            _check_known(table, value, f"{where}{key}.")


def _overlay(kind: Any, raw: dict[str, Any], environ: Mapping[str, str], prefix: str, where: str) -> None:
    for key, field_type in _fields(kind).items():
        variable = prefix + key.upper()
        if variable in environ:
            raw[key] = _from_text(field_type, environ[variable], variable)
        table = _table(field_type)
        nested = f"{variable}__"
        if table is not None and any(name.startswith(nested) for name in environ):
            _overlay(table, raw.setdefault(key, {}), environ, nested, f"{where}{key}.")


def _from_text(kind: Any, text: str, variable: str) -> Any:
    """The value of one variable: as it stands where the field takes it, else as JSON."""
    try:
        return msgspec.to_builtins(msgspec.convert(text, kind, strict=False))
    except (msgspec.ValidationError, ValueError) as plain:
        try:
            return msgspec.to_builtins(msgspec.json.decode(text.encode(), type=kind))
        except (msgspec.MsgspecError, ValueError):
            raise SettingsError(f"{variable} = {_shown(variable.lower(), text)}: {plain}") from plain


def _shown(key: str, value: Any) -> str:
    """A value for an error text; secrets are not shown."""
    return "***" if key.lower().rsplit("_", 1)[-1] in _SECRET else repr(value)


def _explained(kind: Any, raw: Mapping[str, Any], text: str) -> str:
    """Add the value to msgspec's message, which names only the path (`... - at `$.a.b``)."""
    head, found, path = text.partition(" - at `$.")
    if not found:
        return text
    keys = path.rstrip("`").split(".")
    value: Any = raw
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return f"{'.'.join(keys)} = {_shown(keys[-1], value)}: {head}"
