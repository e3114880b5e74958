"""Branches as a harness sees them: open, fork, sub-agent, compact, keepalive, end."""

import os
import secrets
from types import TracebackType
from typing import Self

from .events import DEFAULT_URL, branch_event
from .publisher import Publisher


class Branch:
    """A unit of context with its own requests; a context manager that ends it. `version` counts its compactions.

    ValueError for a name that no header carries.
    """

    def __init__(self, harness: "Harness", name: str, parent: str | None = None, kind: str | None = None) -> None:
        if not (name.isascii() and name.isprintable() and name == name.strip()):
            raise ValueError(f"a branch id that headers carry is printable ASCII without space around it, got {name!r}")
        self.id, self.parent, self.kind, self.version = name, parent, kind, 0
        self._harness = harness
        self._ended = False

    @property
    def headers(self) -> dict[str, str]:
        """What every request of this branch should carry (OpenAI and Anthropic SDKs: `extra_headers`)."""
        found = {"x-ei-branch-id": self.id, "x-ei-branch-version": str(self.version)}
        if self.parent is not None:
            found["x-ei-branch-parent"] = self.parent
        if self.kind is not None:
            found["x-ei-branch-kind"] = self.kind
        return found

    @property
    def side_headers(self) -> dict[str, str]:
        """For a side request (a title, a summary): served under this branch, without becoming its context."""
        return {"x-ei-branch-id": self.id, "x-ei-branch-kind": "transient"}

    def fork(self, name: str | None = None) -> "Branch":
        """A new branch whose context begins with this one's."""
        return self._child("fork", name)

    def subagent(self, name: str | None = None) -> "Branch":
        """A new branch with a context of its own."""
        return self._child("subagent", name)

    def compact(self) -> None:
        """The context was rewritten; requests from now on carry the next version."""
        self.version += 1
        self._harness.say(self.id, "compact", version=self.version)

    def keepalive(self) -> None:
        """The branch is silent but will go on; say it at least once a lease (30 minutes by default)."""
        self._harness.say(self.id, "keepalive")

    def end(self) -> None:
        """The branch is over, and what descends from it. Said once."""
        if not self._ended:
            self._ended = True
            self._harness.say(self.id, "end")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def _child(self, kind: str, name: str | None) -> "Branch":
        child = Branch(self._harness, name or f"{self.id}/{secrets.token_hex(4)}", self.id, kind)
        self._harness.say(child.id, kind, parent=self.id)
        return child


class Harness:
    """Where branches are made. No call of it waits for the broker, and none fails because of it.

    `url`, `nkey`, `partition`: EI_NATS_URL, EI_NATS_NKEY, EI_PARTITION unless given.
    """

    def __init__(
        self, url: str | None = None, *, nkey: str | None = None, partition: str | None = None, tenant: str = ""
    ) -> None:
        environ = os.environ
        self._partition = partition or environ.get("EI_PARTITION") or "p0"
        self._tenant = tenant
        key = nkey if nkey is not None else environ.get("EI_NATS_NKEY", "")
        self.publisher = Publisher(url or environ.get("EI_NATS_URL") or DEFAULT_URL, key)

    def branch(self, name: str | None = None) -> Branch:
        """Open a branch."""
        branch = Branch(self, name or f"branch-{secrets.token_hex(8)}")
        self.say(branch.id, "open")
        return branch

    def say(self, branch: str, kind: str, *, parent: str | None = None, version: int | None = None) -> None:
        """Publish an event of any branch. ValueError for one that cannot be said."""
        event = branch_event(
            branch, kind, parent=parent, version=version, tenant=self._tenant, partition=self._partition
        )
        self.publisher.say(event)

    def close(self) -> None:
        """Send what waits; a broker that does not answer costs two seconds."""
        self.publisher.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
