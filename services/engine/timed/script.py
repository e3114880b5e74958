"""A script of replies: a pattern on the last message, and the text a model would have answered with."""

import json
import re
from array import array
from pathlib import Path
from typing import Any

import msgspec

from services.engine.backend import Leg
from services.engine.timed.settings import TimedSettings
from services.engine.timed.words import Words, last_message, words_of


class UnusableScript(ValueError):
    """A script file that cannot be read; the text names the file, the rule and the mistake."""


class ScriptedCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A call of a tool, written into the text as the project's default tool template asks for it."""

    name: str
    arguments: dict[str, Any] = {}

    def text(self) -> str:
        call = json.dumps({"name": self.name, "arguments": self.arguments}, ensure_ascii=False)
        return f"<tool_call>\n{call}\n</tool_call>"


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`pattern` is searched in the last message, `prompt` in the whole prompt; empty ones match everything.

    The reply is `text` and then each of `calls`.
    """

    pattern: str = ""
    prompt: str = ""
    text: str = ""
    calls: list[ScriptedCall] = []

    def reply(self) -> str:
        return "\n".join([*([self.text] if self.text else []), *(call.text() for call in self.calls)])


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    reply: list[Rule]


class Script:
    """The first rule that matches answers; a request that none matches gets the engine's made-up tokens."""

    def __init__(self, rules: list[Rule], words: Words) -> None:
        self._words = words
        self._rules = [(re.compile(rule.pattern), re.compile(rule.prompt), rule) for rule in rules]

    @classmethod
    def load(cls, path: Path, words: Words) -> "Script":
        """Read `[[reply]]` tables from TOML, or `{"reply": [...]}` from a .json file. UnusableScript."""
        try:
            data = path.read_bytes()
            decode = msgspec.json.decode if path.suffix == ".json" else msgspec.toml.decode
            return cls(decode(data, type=_File).reply, words)
        except (OSError, msgspec.MsgspecError, ValueError, re.error) as error:
            raise UnusableScript(f"script {str(path)!r}: {error}") from error

    def reply(self, leg: Leg) -> list[int] | None:
        """The tokens this leg still has to give, its end left out; None when no rule matches.

        A later attempt's prompt ends with what was answered before: that part is not said again.
        """
        prompt, words = array("I", leg.tokens), self._words
        message, opening = last_message(prompt, words)
        said, whole = words.text(message), None
        for pattern, everywhere, rule in self._rules:
            if not pattern.search(said):
                continue
            if rule.prompt:
                whole = words.text(prompt) if whole is None else whole
                if not everywhere.search(whole):
                    continue
            tokens = words.tokens(rule.reply())
            return tokens[_begun(opening, tokens) if leg.key.attempt > 1 else 0 :]
        return None


def _begun(opening: list[int], reply: list[int]) -> int:
    """How many tokens of the reply the opening ends with."""
    longest = min(len(opening), len(reply))
    return next((n for n in range(longest, 0, -1) if opening[len(opening) - n :] == reply[:n]), 0)


def load_script(settings: TimedSettings) -> Script | None:
    """The script that the settings name; None without one. UnusableScript, UnusableWords."""
    if settings.tokenizer or settings.script:
        words = words_of(settings.tokenizer)
        return Script.load(Path(settings.script), words) if settings.script else None
    return None
