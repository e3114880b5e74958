"""Our own dialect: `x-ei-branch-*` headers, or the body field `branch`. Mistakes are errors here, and named."""

from collections.abc import Mapping
from typing import Any, Final

from schemas.branch import LARGEST_VERSION, BranchKind
from services.router.core.identity_claims import Claims, IdentityError, branch_id, shown

_HEADER_PREFIX: Final = "x-ei-branch-"
_FIELDS: Final = ("id", "parent", "version", "kind", "end")
_VERSION_DIGITS: Final = 20
_TRUE: Final = frozenset({"true", "1"})
_FALSE: Final = frozenset({"false", "0", ""})
_KINDS: Final = {kind.value: kind for kind in BranchKind}


def own_headers(headers: Mapping[str, str], body: Mapping[str, Any]) -> Claims | None:
    """`x-ei-branch-id` and its companions."""
    if f"{_HEADER_PREFIX}id" not in headers:
        return None
    fields: dict[str, object] = {name: headers.get(_HEADER_PREFIX + name) for name in _FIELDS}
    fields |= {name: _from_utf8(fields[name]) for name in ("id", "parent")}
    version = fields["version"]
    if isinstance(version, str) and version.isascii() and version.isdigit() and len(version) <= _VERSION_DIGITS:
        fields["version"] = int(version)
    return _checked(_HEADER_PREFIX, fields)


def _from_utf8(value: object) -> object:
    """A header as its sender wrote it: servers read headers as Latin-1, programs write them in UTF-8."""
    try:
        return value.encode("latin-1").decode() if isinstance(value, str) else value
    except UnicodeError:
        return value


def own_body(headers: Mapping[str, str], body: Mapping[str, Any]) -> Claims | None:
    """The body field `branch`: an object of id, parent, version, kind, end."""
    branch = body.get("branch")
    if branch is None:
        return None
    if not isinstance(branch, Mapping):
        raise IdentityError("branch", f"branch must be an object, got {shown(branch)}")
    return _checked("branch.", {name: branch.get(name) for name in _FIELDS})


def _checked(where: str, fields: Mapping[str, object]) -> Claims:
    branch = branch_id(fields["id"], f"{where}id")
    parent = None if fields["parent"] is None else branch_id(fields["parent"], f"{where}parent")
    if parent == branch:
        raise IdentityError(f"{where}parent", f"branch {branch!r} cannot be its own parent")
    kind = _kind(fields["kind"], f"{where}kind")
    if kind in (BranchKind.FORK, BranchKind.SUBAGENT) and parent is None:
        raise IdentityError(f"{where}kind", f"kind {kind.value} needs {where}parent")
    version = _version(fields["version"], f"{where}version")
    return Claims(None, branch, parent, version, kind, end=_flag(fields["end"], f"{where}end"))


def _kind(value: object, param: str) -> BranchKind | None:
    if value is None:
        return None
    if not isinstance(value, str) or value not in _KINDS:
        raise IdentityError(param, f"{param} must be fork, subagent, main or transient, got {shown(value)}")
    return _KINDS[value]


def _version(value: object, param: str) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= LARGEST_VERSION:
        raise IdentityError(param, f"{param} must be a whole number from 0 to {LARGEST_VERSION}, got {shown(value)}")
    return value


def _flag(value: object, param: str) -> bool:
    if value is None or isinstance(value, bool):
        return bool(value)
    if isinstance(value, str) and value.lower() in _TRUE | _FALSE:
        return value.lower() in _TRUE
    raise IdentityError(param, f"{param} must be true or false, got {shown(value)}")
