"""What an answer is made of, in the order in which it is said."""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Text:
    """Words for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """What the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The model calls a tool; `index` counts the calls of one answer."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallPart:
    """More of the arguments of a call: a part of one JSON document."""

    index: int
    arguments: str


Piece = Text | Thought | CallBegun | CallPart


@dataclass(slots=True)
class ToolCall:
    """One whole call; `arguments` is JSON as the model wrote it."""

    name: str
    arguments: str = ""


@dataclass(slots=True)
class Gathered:
    """A whole answer."""

    text: str = ""
    thought: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    @classmethod
    def of(cls, pieces: Iterable[Piece]) -> "Gathered":
        found = cls()
        texts, thoughts = list[str](), list[str]()
        at: dict[int, ToolCall] = {}
        for piece in pieces:
            if isinstance(piece, Text):
                texts.append(piece.text)
            elif isinstance(piece, Thought):
                thoughts.append(piece.text)
            elif isinstance(piece, CallBegun):
                at[piece.index] = ToolCall(piece.name)
            elif piece.index in at:
                at[piece.index].arguments += piece.arguments
        found.text, found.thought = "".join(texts), "".join(thoughts)
        found.calls = list(at.values())
        return found
