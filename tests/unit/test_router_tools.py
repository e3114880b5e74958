"""Tools: the default template, and reading answers that may hold calls."""

from typing import Any

from services.router.api.conversation import chat_messages
from services.router.api.images import Images
from services.router.api.reader import ParsedReader, PlainReader
from services.router.api.tools import arguments_of, chat_tools
from services.router.core.effects import End
from services.router.text.byte_tokenizer import byte_tokenizer
from services.router.text.chat_template import CHATML, ChatTemplate
from services.router.text.default_tools import in_plain_messages
from services.router.text.pieces import CallBegun, CallPart, Gathered, Piece, Text
from services.router.text.stream import TextStream
from tests.router_records import record

TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
USER = {"role": "user", "content": "go"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": "é"}}}
END = End(record())


def test_tools_are_said_in_the_system_message() -> None:
    alone = in_plain_messages([USER], [TOOL])
    assert [message["role"] for message in alone] == ["system", "user"]
    assert '{"name": "f", "description": "d", "parameters": {"type": "object"}}' in alone[0]["content"]
    joined = in_plain_messages([{"role": "system", "content": "rules"}, USER], [TOOL])
    assert joined[0]["content"] == f"rules\n\n{alone[0]['content']}"


def test_calls_and_results_are_said_and_roles_take_turns() -> None:
    history: list[dict[str, Any]] = [
        USER,
        {"role": "assistant", "content": "sure", "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
        {"role": "user", "content": "so?"},
        {"role": "user", "content": "well?"},
    ]
    call = '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>'
    results = "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>\nso?"
    assert in_plain_messages(history, []) == [
        USER,
        {"role": "assistant", "content": f"sure\n{call}\n{call}"},
        {"role": "user", "content": results},
        {"role": "user", "content": "well?"},
    ]


def test_a_template_with_tools_of_its_own_gets_them() -> None:
    own = ChatTemplate("{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}" + CHATML)
    assert own.takes_tools
    assert own.render([USER], tools=[TOOL]).startswith("[f]<|im_start|>user")
    asking = ChatTemplate("{% if tools is not none %}{{ tools[0].function.name }}{% endif %}" + CHATML)
    assert asking.render([USER]).startswith("<|im_start|>user")
    default = ChatTemplate(CHATML)
    assert not default.takes_tools
    assert "<tools>" in default.render([USER], tools=[TOOL])
    assert "<tools>" not in default.render([USER])


def test_a_late_system_message_is_never_lost() -> None:
    messages = [USER, {"role": "assistant", "content": "a"}, {"role": "system", "content": "late"}]
    strict = ChatTemplate(
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}"
        "[{{ m.role }}:{{ m.content }}]{% endfor %}"
    )
    silent = ChatTemplate("{% for m in messages if m.role != 'system' %}[{{ m.role }}:{{ m.content }}]{% endfor %}")
    for template in (strict, silent):
        assert template.render(messages).endswith("[user:late]")
    assert "<|im_start|>system\nlate" in ChatTemplate(CHATML).render(messages)


def test_arguments_that_are_no_object_stay_text() -> None:
    assert arguments_of('{"a": 1}') == {"a": 1}
    assert arguments_of("") == arguments_of(None) == {}
    assert arguments_of('{"a": ') == '{"a": '
    assert arguments_of("[1]") == "[1]"


def test_no_choice_of_tools_is_no_tools() -> None:
    assert chat_tools({"tools": [TOOL], "tool_choice": "auto"}).functions == (TOOL,)
    assert not chat_tools({"tools": [TOOL], "tool_choice": "none"})
    assert chat_tools({"tools": [TOOL], "parallel_tool_calls": False}).one_call


class FakeParsing:
    """Says each word of the text as a call of its own."""

    def __init__(self) -> None:
        self.closed = 0
        self.count = 0

    async def push(self, text: str) -> list[Piece]:
        return await self.whole(text)

    async def end(self, *, cut: bool) -> list[Piece]:
        return [Text("!")]

    async def whole(self, text: str, *, cut: bool = False) -> list[Piece]:
        found: list[Piece] = []
        for word in text.split():
            found += [CallBegun(self.count, word), CallPart(self.count, "{}")]
            self.count += 1
        return found

    def close(self) -> None:
        self.closed += 1


def parsed(*, streaming: bool, one_call: bool = False, stops: tuple[str, ...] = ()) -> ParsedReader:
    plain = PlainReader(TextStream(byte_tokenizer(), stops), frozenset({257}))
    return ParsedReader(plain, FakeParsing(), streaming=streaming, one_call=one_call)  # type: ignore[arg-type]


async def test_a_stream_is_parsed_as_it_comes_and_a_whole_answer_at_its_end() -> None:
    streaming, whole = parsed(streaming=True), parsed(streaming=False)
    assert len(await streaming.read(list(b"a b"), None)) == 4
    assert await streaming.read(list(b" c"), END) == [CallBegun(2, "c"), CallPart(2, "{}"), Text("!")]
    assert await whole.read(list(b"a b"), None) == []
    assert len(Gathered.of(await whole.read(list(b" c"), END)).calls) == 3
    assert (streaming.calls, whole.calls) == (3, 3)


async def test_an_answer_of_one_call_stops_before_the_second() -> None:
    reader = parsed(streaming=True, one_call=True)
    assert await reader.read(list(b"a b"), None) == [CallBegun(0, "a"), CallPart(0, "{}")]
    assert (reader.stopped, reader.calls) == (True, 1)
    assert await reader.read(list(b"c"), END) == []


async def test_a_stop_string_ends_a_parsed_answer_once() -> None:
    reader = parsed(streaming=True, stops=("STOP",))
    assert await reader.read(list(b"a STOP b"), None) == [CallBegun(0, "a"), CallPart(0, "{}"), Text("!")]
    assert (reader.stopped, reader.stop) == (True, "STOP")
    assert await reader.read([], END) == []


def test_a_field_that_is_null_is_not_there_for_a_template() -> None:
    asks = ChatTemplate(
        "{% for m in messages %}{% if 'tool_calls' in m %}{{ m.tool_calls | length }}{% endif %}"
        "{{ m.name is defined }}{{ m.content }}{% endfor %}"
    )
    nulls: dict[str, Any] = dict.fromkeys(("tool_calls", "name", "refusal", "function_call"))
    said = chat_messages([{"role": "assistant", "content": "a", **nulls}], Images())
    assert asks.render(said) == "Falsea"
    assert asks.render(chat_messages([{"role": "assistant", "content": "a", "tool_calls": []}], Images())) == "Falsea"
