"""The process that runs SGLang's own parsers of tool calls and of reasoning, for one router: frames in, frames out.

Started as `python -m services.router.text.parser_worker`. A piece of a result is ["text" | "thought", words],
["call", index, name] or ["part", index, arguments].
"""

import re
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from services.router.text.worker_frames import run, without_gpu_packages

Raw = list[Any]
_INSIDE_CALL = re.compile(r"[^}>\]\n]{0,31}[^}>\]\n]|[}>\]\n]")
"""What of a call's arguments is parsed at once, since each step reads them all again: never past what may end it."""


class Vocabulary:
    """The names of special tokens, as SGLang's detection asks a tokenizer for them."""

    def __init__(self, names: list[str]) -> None:
        self._names = names

    def get_vocab(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self._names)}


class Parsing:
    """The parsers of one answer. Reasoning is taken off first, what is left may hold calls."""

    def __init__(self, payload: dict[str, Any]) -> None:
        from sglang.srt.entrypoints.openai.protocol import Tool
        from sglang.srt.function_call.function_call_parser import FunctionCallParser
        from sglang.srt.parser.reasoning_parser import ReasoningParser

        tools, reasoning = [Tool(**tool) for tool in payload["tools"]], payload["reasoning_parser"]
        self._calls = FunctionCallParser(tools, payload["tool_parser"]) if tools else None
        self._reasoning = None
        if reasoning:
            self._reasoning = ReasoningParser(
                reasoning, force_reasoning=payload["thinking"] or None, tool_call_parser_active=bool(tools)
            )
        self._indexes: dict[int, int] = {}
        self._space = ""
        self._written: list[str] = []

    def push(self, text: str) -> list[Raw]:
        """What more text makes certain."""
        found: list[Raw] = []
        if self._reasoning is not None:
            thought, normal = self._reasoning.parse_stream_chunk(text)
            found += _words("thought", thought)
            text = normal or ""
        return found + self._pushed(text)

    def end(self, cut: bool) -> list[Raw]:
        """What was held back. The arguments of a call that was `cut` are not completed."""
        found: list[Raw] = []
        if self._reasoning is not None:
            thought, normal = self._reasoning.parse_stream_end()
            found += _words("thought", thought)
            found += self._pushed(normal or "")
        if self._calls is not None:
            text, calls = self._calls.parse_stream_end()
            found += self._said(text) + self._streamed(calls) + self._unsaid(cut)
        return found + (_words("text", self._space) if not self._indexes else [])

    def whole(self, text: str) -> list[Raw]:
        """All of an answer at once."""
        found: list[Raw] = []
        if self._reasoning is not None:
            thought, normal = self._reasoning.parse_non_stream(text)
            found += _words("thought", thought)
            text = normal or ""
        if self._calls is None or not self._calls.has_tool_call(text):
            return found + _words("text", text)
        rest, calls = self._calls.parse_non_stream(text)
        found += _words("text", rest)
        for index, call in enumerate(calls):
            found += [["call", index, call.name], ["part", index, call.parameters]]
        return found

    def cut(self, text: str) -> list[Raw]:
        """An answer that ended before its time: calls before the last are whole, of the last there is what was said."""
        if self._calls is None or not self._calls.has_tool_call(text):
            return self.whole(text)
        return self.push(text) + self.end(cut=True)

    def _pushed(self, text: str) -> list[Raw]:
        """Detectors expect a token at a time: words and a marker in one piece would lose the words."""
        if self._calls is None or not text:
            return _words("text", text)
        found: list[Raw] = []
        self._written.append(text)
        detector, at = self._calls.detector, 0
        while at < len(text):
            inside = _INSIDE_CALL.match(text, at) if getattr(detector, "current_tool_name_sent", False) else None
            end = inside.end() if inside else at + 1
            normal, calls = self._calls.parse_stream_chunk(text[at:end])
            at = end
            found += self._said(normal) + self._streamed(calls)
        return _joined(found)

    def _said(self, text: str) -> list[Raw]:
        """Words; space before a call, between calls and after them is none."""
        whole = self._space + text
        kept = whole.rstrip()
        self._space = whole[len(kept) :]
        return _words("text", kept)

    def _streamed(self, calls: list[Any]) -> list[Raw]:
        found: list[Raw] = []
        for call in calls:
            if call.name:
                self._space = ""
                self._indexes[call.tool_index] = len(self._indexes)
                found.append(["call", self._indexes[call.tool_index], call.name])
            if call.parameters and call.tool_index in self._indexes:
                found.append(["part", self._indexes[call.tool_index], call.parameters])
        return found

    def _unsaid(self, cut: bool) -> list[Raw]:
        """The end of the last call's arguments, where a detector knows them and has not said them.

        Of an answer that was cut they are known only if the model has written them to their end.
        """
        detector = getattr(self._calls, "detector", None)
        known, said = getattr(detector, "prev_tool_call_arr", []), getattr(detector, "streamed_args_for_tool", [])
        last = len(known) - 1
        if last < 0 or last >= len(said) or last not in self._indexes:
            return []
        whole = msgspec.json.encode(known[last].get("arguments", {})).decode()
        spaced = _spaced(known[last].get("arguments", {}))
        written = "".join(self._written) if cut else ""
        known_forms = [text for text in (spaced, whole) if text.startswith(said[last]) and (not cut or text in written)]
        rest = next((text[len(said[last]) :] for text in known_forms), "")
        return [["part", self._indexes[last], rest]] if rest else []


def _joined(found: list[Raw]) -> list[Raw]:
    """Words that follow one another are one piece, and so are parts of one call."""
    joined: list[Raw] = []
    for raw in found:
        if joined and raw[0] != "call" and joined[-1][:-1] == raw[:-1]:
            joined[-1] = [*raw[:-1], joined[-1][-1] + raw[-1]]
        else:
            joined.append(raw)
    return joined


def _spaced(arguments: Any) -> str:
    import json

    return json.dumps(arguments, ensure_ascii=False)


def _words(kind: str, text: str | None) -> list[Raw]:
    return [[kind, text]] if text else []


def detect(payload: dict[str, Any]) -> dict[str, str | bool]:
    """Which parsers belong to a chat template; "" for none. `thinking`: its answers begin inside a thought."""
    from sglang.srt.parser.template_detection import (
        detect_reasoning_parser,
        detect_reasoning_pattern,
        detect_tool_call_parser,
    )

    template, names = payload["template"], Vocabulary(payload["special"])
    always, config = detect_reasoning_pattern(template)
    reasoning = detect_reasoning_parser(template, names, config, always)
    tools = detect_tool_call_parser(template, names, config, always)
    return {"tool_parser": tools or "", "reasoning_parser": reasoning or "", "thinking": bool(always)}


class Worker:
    """Answers requests one after the other."""

    def __init__(self) -> None:
        self._open: dict[str, Parsing] = {}

    def handle(self, verb: str, key: str, payload: Any) -> Any:
        """The result of one request."""
        if verb == "detect":
            return detect(payload)
        if verb == "open":
            self._open[key] = Parsing(payload)
            return None
        if verb == "close":
            self._open.pop(key, None)
            return None
        parsing = self._open[key]
        verbs: dict[str, Callable[[Any], list[Raw]]] = {
            "push": parsing.push,
            "end": parsing.end,
            "whole": parsing.whole,
            "cut": parsing.cut,
        }
        return verbs[verb](payload)


if __name__ == "__main__":
    without_gpu_packages()
    sys.exit(run(Worker().handle))
