"""A request's prompt as text parts in the order in which a model reads them, whatever the API. Pure.

Marks that move from message to message without being read by the model (`cache_control`) are left out, and one block of
text is what it says: Claude Code writes its last message as blocks, and the same one as a string in the next request.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

_BEFORE: Final = ("tools", "functions", "system", "instructions")
_TURNS: Final = ("messages", "input", "prompt")
_UNREAD: Final = frozenset({"cache_control"})
_TEXTS: Final = ("text", "input_text", "output_text")


def parts_of(body: Mapping[str, Any]) -> list[str]:
    """Tools, instructions, then one part a message; [] for a body without a prompt."""
    turns = next((body[key] for key in _TURNS if body.get(key) is not None), None)
    if turns is None:
        return []
    before = [_text([key, body[key]]) for key in _BEFORE if body.get(key)]
    return before + [_text(turn) for turn in (turns if isinstance(turns, list) else [turns])]


def _text(value: Any) -> str:
    return json.dumps(_read(value), ensure_ascii=False, sort_keys=True, default=str)


def _read(value: Any, depth: int = 0) -> Any:
    if depth > 32:
        return None
    if isinstance(value, dict):
        return {key: _said(_read(inner, depth + 1)) for key, inner in value.items() if key not in _UNREAD}
    if isinstance(value, list):
        return [_read(inner, depth + 1) for inner in value]
    return value


def _said(value: Any) -> Any:
    """The words of a list of one block of text; anything else as it is."""
    only = value[0] if isinstance(value, list) and len(value) == 1 else None
    if isinstance(only, dict) and only.keys() == {"type", "text"} and only["type"] in _TEXTS:
        return only["text"]
    return value
