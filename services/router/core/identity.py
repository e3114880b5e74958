"""Who asks: from the headers and the body of a call to a branch identity. One row per dialect, first match wins."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from schemas.branch import BranchKind

MAX_BRANCH_CHARACTERS: Final = 256
_HEADER_PREFIX: Final = "x-ei-branch-"
_VERSION_DIGITS: Final = 20
_TRUE: Final = frozenset({"true", "1"})
_FALSE: Final = frozenset({"false", "0", ""})
_KINDS: Final = {kind.value: kind for kind in BranchKind}


class IdentityError(ValueError):
    """A branch field that cannot be used; `param` names the header or body field."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True)
class Identity:
    """The branch a request belongs to. `branch` None: the directory infers it from the context.

    `explicit`: the harness said so itself (branch and version are then signals, not guesses). `end`: the branch ends
    with this request's answer.
    """

    tenant: str
    branch: str | None = None
    parent: str | None = None
    version: int | None = None
    kind: BranchKind | None = None
    end: bool = False
    explicit: bool = False


@dataclass(frozen=True, slots=True)
class Claims:
    """What one dialect says, as it stands in the call; `where` prefixes the field names of error messages."""

    where: str
    branch: object = None
    parent: object = None
    version: object = None
    kind: object = None
    end: object = None


Row = Callable[[Mapping[str, str], Mapping[str, Any]], Claims | None]


def own_headers(headers: Mapping[str, str], body: Mapping[str, Any]) -> Claims | None:
    """`x-ei-branch-id` and its companions; header names in lower case."""
    if f"{_HEADER_PREFIX}id" not in headers:
        return None
    field = {name: headers.get(_HEADER_PREFIX + name) for name in ("id", "parent", "version", "kind", "end")}
    version: object = field["version"]
    if isinstance(version, str) and version.isascii() and version.isdigit() and len(version) <= _VERSION_DIGITS:
        version = int(version)
    return Claims(_HEADER_PREFIX, field["id"], field["parent"], version, field["kind"], field["end"])


def own_body(headers: Mapping[str, str], body: Mapping[str, Any]) -> Claims | None:
    """The body field `branch`: an object of id, parent, version, kind, end."""
    branch = body.get("branch")
    if branch is None:
        return None
    if not isinstance(branch, Mapping):
        raise IdentityError("branch", f"branch must be an object, got {_shown(branch)}")
    return Claims("branch.", *(branch.get(name) for name in ("id", "parent", "version", "kind", "end")))


ROWS: Final[tuple[Row, ...]] = (own_headers, own_body)
"""Dialects in order of precedence: the more explicit a harness is, the earlier its row."""


def identify(tenant: str, headers: Mapping[str, str], body: Mapping[str, Any]) -> Identity:
    """The identity of a call; IdentityError where a row matches but a field of it is unusable."""
    for row in ROWS:
        claims = row(headers, body)
        if claims is not None:
            return _checked(tenant, claims)
    return Identity(tenant)


def _checked(tenant: str, claims: Claims) -> Identity:
    branch = branch_id(claims.branch, f"{claims.where}id")
    parent = None if claims.parent is None else branch_id(claims.parent, f"{claims.where}parent")
    if parent == branch:
        raise IdentityError(f"{claims.where}parent", f"branch {branch!r} cannot be its own parent")
    kind = _kind(claims.kind, f"{claims.where}kind")
    if kind in (BranchKind.FORK, BranchKind.SUBAGENT) and parent is None:
        raise IdentityError(f"{claims.where}kind", f"kind {kind.value} needs {claims.where}parent")
    version = _version(claims.version, f"{claims.where}version")
    return Identity(tenant, branch, parent, version, kind, _flag(claims.end, f"{claims.where}end"), explicit=True)


def branch_id(value: object, param: str) -> str:
    """A usable branch id: a string of 1 to 256 printable characters."""
    if not isinstance(value, str) or not 0 < len(value) <= MAX_BRANCH_CHARACTERS or not value.isprintable():
        raise IdentityError(
            param, f"{param} must be 1 to {MAX_BRANCH_CHARACTERS} printable characters, got {_shown(value)}"
        )
    return value


def _kind(value: object, param: str) -> BranchKind | None:
    if value is None:
        return None
    if not isinstance(value, str) or value not in _KINDS:
        raise IdentityError(param, f"{param} must be fork, subagent or main, got {_shown(value)}")
    return _KINDS[value]


def _version(value: object, param: str) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 31:
        raise IdentityError(param, f"{param} must be a whole number from 0 to {(1 << 31) - 1}, got {_shown(value)}")
    return value


def _flag(value: object, param: str) -> bool:
    if value is None or isinstance(value, bool):
        return bool(value)
    if isinstance(value, str) and value.lower() in _TRUE | _FALSE:
        return value.lower() in _TRUE
    raise IdentityError(param, f"{param} must be true or false, got {_shown(value)}")


def _shown(value: object) -> str:
    text = f"a string of {len(value)} characters" if isinstance(value, str) and len(value) > 40 else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
