"""A still cluster for the rules of compared systems: nodes are what a test says, nothing happens by itself."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from schemas.phase import Phase
from services.engine.core.timing import Coefficients
from services.simulator.call import Call
from services.simulator.hardware import PROFILES, Hardware
from services.simulator.system import Action, Place

BLOCK = 64
_IDS = count()


def call(prompt_tokens: int = 64_000, **given: object) -> Call:
    """A request of an own branch; `given` overrides any field."""
    number = next(_IDS)
    known: dict[str, object] = {
        "id": f"r{number}",
        "agent": f"a{number}",
        "branch": f"b{number}",
        "parent": None,
        "kind": "append",
        "version": 0,
        "turn": 0,
        "keys": array("Q", range(number << 12, (number << 12) + prompt_tokens // BLOCK)),
        "output_keys": array("Q"),
        "prompt_tokens": prompt_tokens,
        "output_tokens": 100,
        "media": 0,
        "last": False,
        "arrived_at": 0.0,
        "placed_at": 0.0,
    }
    return Call(**(known | given))


@dataclass
class StillNode:
    """A `NodeView` whose values are set by hand. `holds`: per request (device, either tier) leading blocks."""

    name: str
    phase: Phase | None = Phase.PREFILL
    moving: bool = False
    prefill_calls: dict[str, Call] = field(default_factory=dict)
    decode_calls: dict[str, Call] = field(default_factory=dict)
    queued_uncached: int = 0
    decoding: int = 0
    decode_kv: int = 0
    waiting_decode_kv: int = 0
    l1_tokens: int = 2_900_000
    l2_tokens: int = 20_000_000
    l2_used_tokens: int = 0
    l2_referenced_tokens: int = 0
    holds: dict[str, tuple[int, int]] = field(default_factory=dict)

    def cached_blocks(self, of: Call) -> tuple[int, int]:
        return self.holds.get(of.id, (0, 0))

    def queues(self, *tokens: int) -> None:
        """Prompts that wait for their prefill here."""
        for each in tokens:
            waiting = call(each)
            self.prefill_calls[waiting.id] = waiting

    def prefills(self, *tokens: int) -> None:
        """Prompts in prefill here."""
        for each in tokens:
            running = call(each, prefill_started_at=1.0)
            self.prefill_calls[running.id] = running

    def decodes(self, *tokens: int) -> list[Call]:
        """Contexts in decode here."""
        calls = [call(each, prefill_started_at=1.0, prefilled_at=2.0, decode_node=self.name) for each in tokens]
        self.decode_calls |= {each.id: each for each in calls}
        self.decode_kv += sum(tokens)
        self.decoding += len(tokens)
        return calls


@dataclass
class StillCluster:
    """A `Cluster` of `prefill` and `decode` nodes p0, p1, ..., d0, d1, ...; `draws` is what `draw` answers."""

    prefill: int = 2
    decode: int = 2
    draws: list[float] = field(default_factory=list)
    hardware: Hardware = PROFILES["glm-5.2/gb300"]
    block_tokens: int = BLOCK

    def __post_init__(self) -> None:
        self.nodes: dict[str, StillNode] = {
            **{f"p{i}": StillNode(f"p{i}") for i in range(self.prefill)},
            **{f"d{i}": StillNode(f"d{i}", Phase.DECODE) for i in range(self.decode)},
        }

    @property
    def batch_tokens(self) -> int:
        return self.hardware.batch_tokens

    @property
    def times(self) -> Coefficients:
        return self.hardware.times

    def serving(self, phase: Phase) -> Sequence[StillNode]:
        return [node for node in self.nodes.values() if node.phase is phase]

    def draw(self) -> float:
        return self.draws.pop(0) if self.draws else 0.0

    def refer(self, node: str, keys: bytes, *, referenced: bool, unreachable: bool) -> None: ...

    def value(self, node: str, keys: bytes, value: int, *, referenced: bool) -> None: ...

    def __getitem__(self, name: str) -> StillNode:
        return self.nodes[name]


def placed(actions: Sequence[Action]) -> Mapping[str, Place]:
    """The placements among actions, by request."""
    return {action.call.id: action for action in actions if isinstance(action, Place)}
