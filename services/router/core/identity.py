"""Who asks: from tenant, headers and body of a call to a branch identity. One row per dialect, first match wins."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from schemas.branch import BranchKind, Compaction
from services.router.core import identity_harness as harness
from services.router.core.identity_claims import IdentityError, Read, branch_id
from services.router.core.identity_own import own_body, own_headers

__all__ = ["DIALECTS", "Identity", "IdentityError", "branch_id", "identify"]


@dataclass(frozen=True, slots=True)
class Identity:
    """The branch a request belongs to. `branch` None: the directory infers it from the context.

    `explicit`: the harness named the branch itself (branch and version are then signals, not guesses). `end`: the
    branch ends with this request's answer. `family`: a session id that several branches share. `dialect`: the row that
    matched, "" when none did.
    """

    tenant: str
    branch: str | None = None
    parent: str | None = None
    version: int | None = None
    kind: BranchKind | None = None
    end: bool = False
    explicit: bool = False
    family: str | None = None
    compaction: Compaction | None = None
    dialect: str = ""


OWN: Final = "ei"
DIALECTS: Final[tuple[tuple[str, Read], ...]] = (
    (OWN, own_headers),
    (OWN, own_body),
    ("dynamo", harness.dynamo),
    ("claude-code", harness.claude_code),
    ("codex", harness.codex),
    ("opencode", harness.opencode),
    ("litellm", harness.litellm),
    ("session-header", harness.session_header),
    ("session-field", harness.session_field),
    ("user-id", harness.user_id),
    ("prompt-cache-key", harness.prompt_cache_key),
)
"""In order of precedence: the more explicit a harness is, the earlier its row."""


def identify(tenant: str, headers: Mapping[str, str], body: Mapping[str, Any]) -> Identity:
    """The identity of a call (header names in lower case); IdentityError where a field of our own cannot be used."""
    for dialect, read in DIALECTS:
        claims = read(headers, body)
        if claims is not None:
            return Identity(
                tenant,
                claims.branch,
                claims.parent,
                claims.version,
                claims.kind,
                claims.end,
                explicit=claims.branch is not None,
                family=claims.family,
                compaction=claims.compaction,
                dialect=dialect,
            )
    return Identity(tenant)
