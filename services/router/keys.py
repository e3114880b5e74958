"""Who a caller is: API keys from a file to tenants. Without a file everybody is the default tenant."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from schemas.branch import DEFAULT_TENANT
from services.router.core.failure import AUTHENTICATION, PERMISSION, Failure
from services.settings import SettingsError


@dataclass(frozen=True, slots=True)
class Caller:
    """The tenant a call belongs to, and whether it may order things."""

    tenant: str
    admin: bool = False


class _Key(msgspec.Struct, forbid_unknown_fields=True):
    """`key` in clear, or `sha256` of it in hex."""

    tenant: str = DEFAULT_TENANT
    admin: bool = False
    key: str = ""
    sha256: str = ""


class _File(msgspec.Struct, forbid_unknown_fields=True):
    keys: list[_Key]


class ApiKeys:
    """Callers by the sha256 of their key, so that looking one up says nothing about the others."""

    def __init__(self, callers: Mapping[str, Caller] | None = None) -> None:
        self._callers = callers

    @classmethod
    def load(cls, path: str) -> "ApiKeys":
        """Read `[[keys]]` tables of key (or sha256), tenant, admin; "" for no keys. SettingsError names the mistake."""
        if not path:
            return cls()
        try:
            file = msgspec.toml.decode(Path(path).read_bytes(), type=_File)
        except (OSError, msgspec.MsgspecError, ValueError) as error:
            raise SettingsError(f"keys_file {path!r}: {error}") from error
        callers: dict[str, Caller] = {}
        for number, entry in enumerate(file.keys):
            if bool(entry.key) == bool(entry.sha256):
                raise SettingsError(f"keys_file {path!r}: entry {number} needs one of `key` and `sha256`")
            digest = entry.sha256.lower() or _digest(entry.key)
            if digest in callers:
                raise SettingsError(f"keys_file {path!r}: entry {number} repeats a key")
            callers[digest] = Caller(entry.tenant, entry.admin)
        return cls(callers)

    def caller(self, headers: Mapping[str, str], host: str | None) -> Caller | Failure:
        """The caller of a request with these (lower-case) headers; without keys those on this host may order things."""
        if self._callers is None:
            return Caller(DEFAULT_TENANT, admin=host in ("127.0.0.1", "::1", None))
        scheme, _, token = headers.get("authorization", "").partition(" ")
        key = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        if not key:
            return Failure(401, AUTHENTICATION, "no API key: send `Authorization: Bearer KEY`", code="missing_api_key")
        return self._callers.get(_digest(key)) or Failure(
            401, AUTHENTICATION, "the API key is not known", code="invalid_api_key"
        )


def may_order(caller: Caller) -> Failure | None:
    """403 unless the caller is an administrator."""
    return None if caller.admin else Failure(403, PERMISSION, "this needs an admin key", code="admin_only")


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()
