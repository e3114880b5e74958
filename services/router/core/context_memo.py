"""Contexts met before, so that of the next one of a branch only what is new is hashed."""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from schemas.block_key import TOKEN_BYTES, full_blocks
from services.router.core.context import Context, KeyScheme

_HEAD_BYTES = 1024
_PER_HEAD = 4
_ENOUGH = 0.9
_MORE_BYTES = 64
"""Of a prompt that leaves an answer so much more is told: the same text may take more tokens."""
_DIGEST_BYTES = 80
"""A digest and its place in a list, about; those that contexts share are counted for each."""

Name = tuple[bytes, str]


@dataclass(frozen=True, slots=True)
class Departure:
    """A branch's next prompt leaves the branch's last answer: what was generated, what stands there now (packed).

    `lost_tokens`: generated tokens whose KV is of no use any more.
    """

    generated: bytes
    given: bytes
    lost_tokens: int


class ContextMemo:
    """The latest context of each branch, and the latest few with the same beginning, for requests without a branch.

    What is kept takes at most `capacity_bytes`, about. A context that was forgotten is hashed as a whole: the result is
    always that of `Context.of`.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.bytes = 0
        self._branches: OrderedDict[Name, Context] = OrderedDict()
        self._prompts: dict[Name, int] = {}
        self._heads: OrderedDict[tuple[bytes, bytes], deque[Context]] = OrderedDict()

    def context(
        self, packed: bytes, scheme: KeyScheme, branch: str | None = None, parent: str | None = None
    ) -> Context:
        """The context of these tokens; `branch` and `parent` say where to look for one it shares a prefix with."""
        made = self._shared(packed, scheme, self._candidates(packed, scheme, branch, parent))
        self._keep(made, branch)
        return made

    def answered(self, context: Context, tokens: Sequence[int], branch: str) -> None:
        """The branch's answer to `context`: its next prompt goes on from there, if the harness says it the same."""
        made = context.extended(tokens)
        self._keep_branch(made, branch)
        if (made.scheme.seed, branch) in self._branches:
            self._prompts[made.scheme.seed, branch] = context.tokens

    def departure(self, packed: bytes, scheme: KeyScheme, branch: str | None) -> Departure | None:
        """Whether these tokens, the branch's next prompt, leave its last answer before its end."""
        name = (scheme.seed, branch or "")
        last, prompt = self._branches.get(name), self._prompts.get(name)
        if last is None or prompt is None:
            return None
        common = _common_tokens(packed, last.packed)
        if not prompt <= common < last.tokens or common * TOKEN_BYTES == len(packed):
            return None
        start, end = prompt * TOKEN_BYTES, len(last.packed)
        return Departure(last.packed[start:], packed[start : end + _MORE_BYTES], last.tokens - common)

    def check(self) -> None:
        assert self._prompts.keys() <= self._branches.keys()
        kept = [*self._branches.values(), *(context for few in self._heads.values() for context in few)]
        assert self.bytes == sum(_size(context) for context in kept)
        assert self.bytes <= self.capacity_bytes
        for context in kept:
            context.check()

    def _candidates(
        self, packed: bytes, scheme: KeyScheme, branch: str | None, parent: str | None
    ) -> Iterable[Context]:
        for name in (branch, parent):
            found = self._branches.get((scheme.seed, name)) if name is not None else None
            if found is not None:
                yield found
        yield from reversed(self._heads.get((scheme.seed, packed[:_HEAD_BYTES]), ()))

    def _shared(self, packed: bytes, scheme: KeyScheme, candidates: Iterable[Context]) -> Context:
        best, blocks = None, 0
        for found in candidates:
            if found.scheme != scheme:
                continue
            common = full_blocks(_common_tokens(packed, found.packed), scheme.block_size, scheme.version)
            if common > blocks:
                best, blocks = found, common
            if common >= _ENOUGH * len(found.digests):
                break
        return Context.of(packed, scheme) if best is None else best.branched(packed, blocks)

    def _keep(self, made: Context, branch: str | None) -> None:
        if _size(made) > self.capacity_bytes:
            return
        if branch is not None:
            self._keep_branch(made, branch)
        if len(made.packed) >= _HEAD_BYTES:
            self._keep_head((made.scheme.seed, made.packed[:_HEAD_BYTES]), made)
        while self.bytes > self.capacity_bytes:
            self._forget_one()

    def _keep_branch(self, made: Context, branch: str) -> None:
        name = (made.scheme.seed, branch)
        old = self._branches.pop(name, None)
        self._prompts.pop(name, None)
        self.bytes += _size(made) - (_size(old) if old is not None else 0)
        self._branches[name] = made
        while self.bytes > self.capacity_bytes:
            self._forget_one()

    def _keep_head(self, head: tuple[bytes, bytes], made: Context) -> None:
        few = self._heads.setdefault(head, deque())
        self._heads.move_to_end(head)
        few.append(made)
        self.bytes += _size(made)
        if len(few) > _PER_HEAD:
            self.bytes -= _size(few.popleft())

    def _forget_one(self) -> None:
        """What is least likely to be met again: contexts without a branch come before those of branches."""
        if self._heads:
            head = next(iter(self._heads))
            few = self._heads[head]
            self.bytes -= _size(few.popleft())
            if not few:
                del self._heads[head]
        else:
            name, context = self._branches.popitem(last=False)
            self._prompts.pop(name, None)
            self.bytes -= _size(context)


def _common_tokens(one: bytes, other: bytes) -> int:
    """Tokens both begin with."""
    size = min(len(one), len(other)) // TOKEN_BYTES
    differ = np.frombuffer(one, "<u4", size) != np.frombuffer(other, "<u4", size)
    return int(differ.argmax()) if differ.any() else size


def _size(context: Context) -> int:
    return len(context.packed) + _DIGEST_BYTES * len(context.digests)
