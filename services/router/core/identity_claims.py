"""What a call says about its branch, in whatever dialect: the fields, and when they can be used."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from schemas.branch import BranchKind, Compaction

MAX_BRANCH_CHARACTERS: Final = 256


class IdentityError(ValueError):
    """A branch field that cannot be used; `param` names the header or body field."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True)
class Claims:
    """One dialect's word, checked. `family`: a session id that several branches share; `branch` None: it names none."""

    family: str | None = None
    branch: str | None = None
    parent: str | None = None
    version: int | None = None
    kind: BranchKind | None = None
    compaction: Compaction | None = None
    end: bool = False


Read = Callable[[Mapping[str, str], Mapping[str, Any]], Claims | None]
"""From headers (lower case) and body to claims; None when the call does not speak this dialect."""


def usable(value: object) -> str | None:
    """`value` if it can be the id of a branch: 1 to 256 printable characters."""
    fits = isinstance(value, str) and 0 < len(value) <= MAX_BRANCH_CHARACTERS and value.isprintable()
    return value if isinstance(value, str) and fits else None


def branch_id(value: object, param: str) -> str:
    """`value` as the id of a branch; IdentityError names `param` when it cannot be one."""
    found = usable(value)
    if found is None:
        raise IdentityError(
            param, f"{param} must be 1 to {MAX_BRANCH_CHARACTERS} printable characters, got {shown(value)}"
        )
    return found


def shown(value: object) -> str:
    """A value for an error text, shortened."""
    text = f"a string of {len(value)} characters" if isinstance(value, str) and len(value) > 40 else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
