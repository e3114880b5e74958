"""The timed engine's script: which rule answers, with which tokens, on which attempt."""

from pathlib import Path

import pytest

from schemas.block_key import token_bytes
from schemas.phase import Phase
from schemas.serve import Sampling
from services.engine.backend import Leg, LegKey
from services.engine.timed.script import Script, UnusableScript, load_script
from services.engine.timed.settings import TimedSettings
from services.engine.timed.words import ByteWords

START, END = 256, 257
RULES = """
[[reply]]
pattern = "weather in (\\\\w+)"
text = "Let me see."
calls = [{ name = "weather", arguments = { city = "Paris" } }]

[[reply]]
pattern = "hello"
prompt = "You are brief"
text = "Hi."

[[reply]]
pattern = "hello"
text = "Good day to you."
"""


def chat(*messages: str, begun: str = "") -> list[int]:
    tokens: list[int] = []
    for message in messages:
        tokens += [START, *message.encode(), END, *b"\n"]
    return [*tokens, START, *b"assistant\n", *begun.encode()]


def leg(tokens: list[int], attempt: int = 1) -> Leg:
    key = LegKey("r", attempt, Phase.PREFILL)
    return Leg(key, token_bytes(tokens), len(tokens), Sampling(max_new_tokens=9), room=0, peer="", rendezvous="")


@pytest.fixture
def script(tmp_path: Path) -> Script:
    path = tmp_path / "script.toml"
    path.write_text(RULES)
    return Script.load(path, ByteWords())


def said(script: Script, tokens: list[int], attempt: int = 1) -> str | None:
    reply = script.reply(leg(tokens, attempt))
    return None if reply is None else bytes(reply).decode()


def test_the_first_rule_that_matches_the_last_message_answers(script: Script) -> None:
    assert said(script, chat("system\nYou are brief", "user\nhello")) == "Hi."
    assert said(script, chat("system\nYou are kind", "user\nhello")) == "Good day to you."


def test_earlier_messages_do_not_match(script: Script) -> None:
    assert said(script, chat("user\nhello", "assistant\nGood day to you.", "user\nbye")) is None


def test_a_call_is_written_as_the_default_template_asks(script: Script) -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    assert said(script, chat("user\nthe weather in Paris?")) == f"Let me see.\n{call}"


def test_another_attempt_goes_on_where_the_answer_was(script: Script) -> None:
    assert said(script, chat("user\nhello", begun="Good d"), attempt=2) == "ay to you."
    assert said(script, chat("user\nhello", begun=""), attempt=2) == "Good day to you."


def test_a_prompt_without_messages_is_its_own_last_message(script: Script) -> None:
    assert said(script, list(b"hello")) == "Good day to you."


@pytest.mark.parametrize(
    ("content", "what"),
    [("[[reply]]\npattern = '('", "unterminated"), ("[[reply]]\nanswer = 'x'", "answer"), ("reply = 3", "array")],
)
def test_an_unusable_script_says_why(tmp_path: Path, content: str, what: str) -> None:
    path = tmp_path / "script.toml"
    path.write_text(content)
    with pytest.raises(UnusableScript, match=what):
        load_script(TimedSettings(script=str(path)))
    with pytest.raises(UnusableScript, match="missing"):
        load_script(TimedSettings(script=str(tmp_path / "missing.toml")))


def test_the_script_in_the_guide_can_be_played(tmp_path: Path) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "http.md").read_text()
    path = tmp_path / "script.toml"
    path.write_text(guide.partition("```toml\n")[2].partition("```")[0])
    script = Script.load(path, ByteWords())
    assert "get_weather" in (said(script, chat("user\nthe weather in Paris")) or "")
    assert said(script, chat("user\nx")) == "Anything else."
