"""Requests that say nothing of themselves, in any order and overlapping: claims follow what was answered."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.directory import MatchReply
from services.directory.core.directory import Directory
from tests.unit.directory_bench import Bench, chain

STEMS = ("sys", "system", "another")


def prompt(rnd: random.Random, last: list[str]) -> str:
    """Mostly a context that goes on, its tail rewritten or not; else one that leaves an earlier one, or a new one."""
    if last and rnd.random() < 0.7:
        context = rnd.choice(last)
        kept = context[: len(context) - rnd.randint(0, 2)] if rnd.random() < 0.7 else context[: rnd.randint(1, 6)]
    else:
        kept = rnd.choice(STEMS)
    return kept + "".join(rnd.choice("xyz") for _ in range(rnd.randint(0 if kept else 1, 5)))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1 << 32), steps=st.integers(1, 40))
def test_claims_follow_what_was_answered_and_end_with_the_lease(seed: int, steps: int) -> None:
    rnd, bench = random.Random(seed), Bench()
    running: list[tuple[str, str, MatchReply]] = []
    contexts: list[str] = []
    for number in range(steps):
        if rnd.random() < 0.1:
            bench.tick(rnd.choice((1.0, 600.0)))
        if not running or rnd.random() < 0.6:
            text, name = prompt(rnd, contexts), f"r{number}"
            family = rnd.choice((None, None, "f"))
            reply = bench.match(chain(*text), request=name, family=family)
            assert reply.inferred
            assert reply.branch
            running.append((text, name, reply))
            continue
        text, name, reply = running.pop(rnd.randrange(len(running)))
        if rnd.random() < 0.1:
            bench.match([], request=name, release=True)
            continue
        contexts.append(text)
        counters = bench.core.counters
        passed_over = counters.transient_requests + counters.late_events
        bench.answered(
            reply.branch or "",
            chain(*text),
            request=name,
            version=reply.version,
            life=reply.life,
            lineage=reply.lineage,
            parent=reply.parent,
            inferred=reply.inferred,
            family="f" if (reply.branch or "").startswith("f/") else None,
        )
        overtaken = counters.transient_requests + counters.late_events > passed_over
        sound(bench.core, reply, None if overtaken else len(text))
    for _ in range(3):
        bench.tick(2000.0)
    assert bench.core.references.claimed_blocks == 0
    assert all(not branch.left and not branch.unsettled for branch in bench.core.branches.newest_first())


def sound(core: Directory, reply: MatchReply, blocks: int | None) -> None:
    """The branch that was answered is active and claims the `blocks` of its context, unless one that ran beside it has
    left that context meanwhile (None); what was left and who left it know each other."""
    branch = core.branches.get(("", reply.branch or ""))
    assert branch is not None
    assert branch.active
    assert blocks is None or branch.blocks == blocks
    for each in core.branches.newest_first():
        assert not each.left or each.heir is not None
        assert not each.unsettled or each.parent is not None
        assert each.version >= 0
