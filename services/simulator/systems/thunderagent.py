"""ThunderAgent: programs (branches here) are paused at tool boundaries when a backend's KV is promised to too many.

Rules: "ThunderAgent" (arXiv 2602.13692; ThunderAgent-org/ThunderAgent scheduler/router.py, backend/state.py). Every 5 s
first resume, then pause. A backend's use is the tokens of its programs, reasoning or acting, plus 100 each. Above
capacity: pause acting programs, fewest tokens first, then mark reasoning ones, fewest first, to be paused when their
request ends. Resume: reasoning (after the first step), then new, then acting programs, each by ascending tokens, as
many as fit all backends together; placed best-fit decreasing on the emptiest. A new program starts at once only if
nobody waits and the backend with the fewest tokens has room. A program stays on its backend until it is paused; after
1,800 s paused it is resumed by force.

A backend is a prefill node with what it can keep, device and host memory together (as in Dynamo's port); decode round
robin; nodes and their fixed split are plain SGLang's. Approximate: prompts shared by programs are not subtracted;
tokens are known exactly, not estimated from characters.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from schemas.phase import Phase
from services.simulator.call import Call
from services.simulator.passive import Passive
from services.simulator.system import Action, Place
from services.simulator.systems.static import RoundRobin, Static

TICK_S = 5.0
BUFFER_TOKENS = 100
TIMEOUT_S = 1800.0


@dataclass(slots=True)
class Program:
    """`backend` None: not placed (new or paused). `waiting`: requests held back; `running`: sent. `steps`: requests
    so far. `over`: its last request has been answered."""

    id: str
    tokens: int = 0
    reasoning: bool = True
    backend: str | None = None
    paused: bool = False
    marked: bool = False
    steps: int = 0
    over: bool = False
    waiting: dict[str, Call] = field(default_factory=dict)
    running: set[str] = field(default_factory=set)
    waits_since: float = 0.0

    @property
    def need(self) -> int:
        """Tokens that it takes of a backend."""
        return self.tokens + BUFFER_TOKENS


def resumable(programs: Iterable[Program], room_tokens: int) -> list[Program]:
    """Whom to resume of the paused ones, in the order in which they are placed: most tokens first."""
    queue = sorted(programs, key=lambda p: (1 if p.steps <= 1 else 0 if p.reasoning else 2, p.tokens))
    chosen: list[Program] = []
    for program in queue:
        if program.need <= room_tokens:
            room_tokens -= program.need
            chosen.append(program)
    return sorted(chosen, key=lambda p: -p.tokens)


def to_pause(programs: Iterable[Program], over_tokens: int) -> tuple[list[Program], list[Program]]:
    """(paused now, marked to be paused) of a backend that is `over_tokens` above its capacity."""
    ranked = sorted((p for p in programs if not p.marked), key=lambda p: p.tokens)
    now: list[Program] = []
    later: list[Program] = []
    for chosen, reasoning in ((now, False), (later, True)):
        for program in ranked:
            if over_tokens > 0 and program.reasoning is reasoning:
                chosen.append(program)
                over_tokens -= program.need
    return now, later


class ThunderAgent(Passive):
    """`programs`: those that have not ended."""

    id = "thunderagent"
    traits = Static.traits

    def __init__(self) -> None:
        self.decode = RoundRobin()
        self.programs: dict[str, Program] = {}
        self.pauses = 0
        self._due = TICK_S

    def arrived(self, call: Call, now: float) -> Sequence[Action]:
        program = self.programs.setdefault(call.branch, Program(call.branch))
        program.steps += call.attempt == 0
        program.tokens, program.reasoning = call.prompt_tokens, True
        program.running.discard(call.id)
        program.waiting[call.id], program.waits_since = call, now
        if program.backend is None and not program.paused:
            program.backend = self._backend_for_new(program)
            program.paused = program.backend is None
        return self._send(program)

    def _backend_for_new(self, program: Program) -> str | None:
        if any(other.paused for other in self.programs.values()):
            return None
        used = self._used()
        fitting = [name for name, room in self._room(used).items() if room >= program.need]
        return min(fitting, key=lambda name: used[name], default=None)

    def ended(self, call: Call, now: float) -> Sequence[Action]:
        program = self.programs[call.branch]
        program.running.discard(call.id)
        program.over |= call.last
        program.tokens = call.prompt_tokens + call.output_tokens
        program.reasoning = bool(program.running or program.waiting)
        if program.over and not program.reasoning:
            del self.programs[call.branch]
        elif program.marked and not program.reasoning:
            self._pause(program)
        return ()

    def next_wake(self, now: float) -> float | None:
        return self._due

    def wake(self, now: float) -> Sequence[Action]:
        self._due = now + TICK_S
        self._resume(now)
        used, capacity = self._used(), self._capacity()
        for name in capacity:
            mine = [program for program in self.programs.values() if program.backend == name]
            paused, marked = to_pause(mine, used[name] - capacity[name])
            for program in paused:
                self._pause(program)
            for program in marked:
                program.marked = True
        return [action for program in self.programs.values() for action in self._send(program)]

    def _resume(self, now: float) -> None:
        paused = [program for program in self.programs.values() if program.paused]
        room = {name: free for name, free in self._room(self._used()).items() if free > BUFFER_TOKENS}
        for program in resumable(paused, sum(room.values())):
            emptiest = max(room, key=lambda name: room[name])
            if program.need <= room[emptiest]:
                program.backend, program.paused = emptiest, False
                room[emptiest] -= program.need
        free = self._room(self._used())
        for program in paused:
            if program.paused and program.waiting and now - program.waits_since >= TIMEOUT_S:
                program.backend, program.paused = max(free, key=lambda name: free[name]), False

    def _pause(self, program: Program) -> None:
        self.pauses += 1
        program.backend, program.paused, program.marked = None, True, False

    def _send(self, program: Program) -> Sequence[Action]:
        """Its held requests go to its backend."""
        if program.backend is None:
            return ()
        calls, program.waiting = program.waiting, {}
        program.running |= calls.keys()
        decode = self.cluster.serving(Phase.DECODE)
        return [Place(call, program.backend, self.decode.choose(decode)) for call in calls.values()]

    def _capacity(self) -> dict[str, int]:
        return {node.name: node.l1_tokens + node.l2_tokens for node in self.cluster.serving(Phase.PREFILL)}

    def _used(self) -> dict[str, int]:
        used = dict.fromkeys(self._capacity(), 0)
        for program in self.programs.values():
            if program.backend is not None:
                used[program.backend] += program.need
        return used

    def _room(self, used: dict[str, int]) -> dict[str, int]:
        return {name: capacity - used[name] for name, capacity in self._capacity().items()}
