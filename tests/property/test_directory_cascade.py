"""A parent's end in pieces: whatever comes between two pieces finds what it would find after all of them."""

from collections.abc import Iterable
from typing import Any

from directory_model import pack
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.branch import BranchEvent, BranchEventType
from schemas.directory import MatchQuery
from schemas.kv import ChangeType, KvLocation, LocationChange, Tier
from schemas.phase import Phase, PhaseCommand
from services.directory.core.checkpoint import Saving
from services.directory.core.directory import Directory, DirectoryConfig

BRANCHES, NODES = "abcdef", ("n0", "n1")
CONTEXTS = [[*range(1, 9)], [*range(1, 6), 20, 21], [1, 2, 30], [*range(40, 48)]]
SIGNALS = ("open", "fork", "subagent", "compact", "keepalive")
branches = st.sampled_from(BRANCHES + "gh")
steps = st.one_of(
    st.tuples(st.just("tell"), branches, branches, st.sampled_from(SIGNALS)),
    st.tuples(st.just("answer"), branches, st.integers(0, 3), st.sampled_from(NODES), st.sampled_from((*NODES, None))),
    st.tuples(st.just("infer"), st.integers(0, 3), st.booleans()),
    st.tuples(st.just("end"), branches, st.booleans()),
    st.tuples(st.just("switch"), st.sampled_from(NODES), st.sampled_from(Phase)),
    st.tuples(st.just("tick"), st.sampled_from((1.0, 25.0))),
)


class Run:
    """A directory that is told the steps, with `helping` pieces of work after each; None: all there is."""

    def __init__(self, helping: int | None, inactive_branches: int = 4) -> None:
        self.core = Directory(DirectoryConfig(branch_lease_s=40.0, inactive_branches=inactive_branches), 1)
        self.helping, self.number, self.events, self.now = helping, 0, 0, 0.0
        self.said: list[Any] = []
        for node in NODES:
            changes = [
                LocationChange(type=ChangeType.STORED, tier=Tier.L2, parent=None, hashes=pack(keys))
                for keys in CONTEXTS
            ]
            self.core.on_location(KvLocation(node=node, incarnation=1, seq=1, changes=changes), self.now)
        self.work(None)

    def work(self, pieces: int | None) -> None:
        while self.core.has_work and pieces != 0:
            self.core.work(1)
            pieces = None if pieces is None else pieces - 1
        self.core.check()

    def event(self, branch: str, type_: str, **fields: object) -> None:
        self.events += 1
        event = BranchEvent(id=f"e{self.events}", t=0.0, branch=branch, type=BranchEventType(type_), **fields)  # type: ignore[arg-type]
        self.core.on_branch_event(event, self.now)

    def take(self, step: tuple[Any, ...]) -> None:
        self.number += 1
        match step:
            case "tell", branch, parent, type_:
                self.event(branch, type_, parent=parent)
            case "answer", branch, number, prefill, decode:
                self.answer(number, prefill, decode, branch=branch)
            case "infer", number, placed:
                self.answer(number, "n0" if placed else None, None)
            case "end", branch, cascade:
                self.event(branch, "end", cascade=cascade)
            case "switch", node, phase:
                command = PhaseCommand(
                    id="c", t=0.0, node=node, phase=phase, epoch=self.number, reason="", decision_id=""
                )
                self.core.on_phase(command)
            case "tick", seconds:
                self.now += seconds
                for node in NODES:
                    self.core.on_location(KvLocation(node=node, incarnation=1, seq=1, changes=[]), self.now)
                self.core.tick(self.now)
                self.work(None)
        self.work(self.helping)

    def answer(self, number: int, prefill: str | None, decode: str | None, branch: str | None = None) -> None:
        """A request is asked and answered, or only asked where it has no prefill node."""
        keys = CONTEXTS[number]
        reply = self.core.match(MatchQuery(request=f"r{self.number}", hashes=pack(keys), branch=branch), self.now)
        self.said.append((reply.branch, reply.branch_blocks, reply.lineage, reply.version, reply.life, reply.parent))
        if prefill is not None:
            self.event(
                reply.branch or "",
                "context",
                source="router",
                parent=reply.parent,
                inferred=reply.inferred,
                request=f"r{self.number}",
                life=reply.life,
                lineage=reply.lineage,
                version=reply.version,
                tip=keys[-1],
                blocks=len(keys),
                keys=pack(keys),
                prompt_blocks=len(keys) - 1,
                prefill_node=prefill,
                decode_node=decode,
            )

    def state(self) -> list[Any]:
        """All that a checkpoint says of the branches, and what is claimed on which node."""
        self.work(None)
        saving = Saving(self.core)
        while saving.step():
            pass
        saved = {(branch.tenant, branch.id): branch for branch in saving.take().branches}
        saving.close()
        nodes = self.core.locations.nodes.values()
        return [saved, self.core.references.claimed_blocks, [n.holdings[Tier.L2].referenced for n in nodes]]


def told(helping: int | None, steps: Iterable[tuple[Any, ...]]) -> Run:
    run = Run(helping)
    for step in steps:
        run.take(step)
    return run


@settings(max_examples=200)
@given(st.lists(steps, max_size=8), st.lists(steps, min_size=1, max_size=8), st.integers(0, 2))
def test_what_comes_between_two_pieces_finds_all_of_them_done(
    before: list[tuple[Any, ...]], after: list[tuple[Any, ...]], helping: int
) -> None:
    family = [("tell", child, "a" if child < "e" else "b", "subagent") for child in BRANCHES[1:]]
    answers = [("answer", branch, number % 4, "n0", "n1") for number, branch in enumerate(BRANCHES)]
    all_steps = [*family, *answers, *before, ("end", "a", True), *after]
    in_pieces, at_once = told(helping, all_steps), told(None, all_steps)
    assert in_pieces.said == at_once.said
    assert in_pieces.state() == at_once.state()


def test_the_event_itself_takes_the_claims_of_no_descendant() -> None:
    run = Run(0, inactive_branches=1000)
    for number in range(300):
        run.number += 1
        run.event(f"c{number}", "subagent", parent="a")
        run.answer(number % 4, "n0", "n1", branch=f"c{number}")
    run.work(None)
    claims = run.core.references.claimed_blocks
    run.take(("end", "a", True))
    assert run.core.references.claimed_blocks == claims > 0
    assert run.core.branches.active == 0
    pieces = 0
    while run.core.references.leaving:
        run.core.work(1)
        pieces += 1
    assert pieces == 300
    assert run.core.references.claimed_blocks == 0
