"""Tokenizers, templates and streams of text."""

import asyncio
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Library

from schemas.block_key import token_list
from services.engine.sglang.model import ModelMissing, prepare
from services.router.text.byte_tokenizer import byte_tokenizer
from services.router.text.chat_template import ChatTemplate, TemplateFailed
from services.router.text.stream import StopFinder, TextStream
from services.router.text.tokenizer import NotText, UnusableTokenizer, load_tokenizer

SMILE = "😀"


@pytest.fixture(scope="module")
def library() -> Library:
    return byte_tokenizer()


async def test_bytes_are_tokens_and_markers_are_special() -> None:
    tokenizer = load_tokenizer("byte")
    assert token_list(await tokenizer.encode("hé<|im_end|>", special=True)) == [0x68, 0xC3, 0xA9, 257]
    assert tokenizer.stop_ids == (257, 258)
    assert tokenizer.decode([0x68, 257]) == "h<|im_end|>"


async def test_long_text_is_encoded_the_same_off_the_loop() -> None:
    tokenizer = load_tokenizer("byte")
    text = "héllo " * 2000
    assert token_list(await tokenizer.encode(text, special=False)) == list(text.encode())


async def test_half_a_surrogate_pair_is_not_text() -> None:
    with pytest.raises(NotText, match="character 1"):
        await load_tokenizer("byte").encode("a\ud800", special=False)


def test_missing_folder_is_named() -> None:
    with pytest.raises(UnusableTokenizer, match=r"/nowhere.*tokenizer\.json"):
        load_tokenizer("/nowhere")


def test_generation_config_names_the_ends_of_an_answer(tmp_path: Path) -> None:
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, 258]}))
    assert load_tokenizer(str(tmp_path)).stop_ids == (257, 258)


TEMPLATES = (
    "{% for m in messages %}{{ m['content'] | tojson }}{% if loop.last %}{{ eos_token }}{% endif %}{% endfor %}",
    "{%- for m in messages %}\n  {%- if m.role == 'skip' %}{% continue %}{% endif %}\n {{- m.content }}\n{%- endfor %}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
)
MESSAGES = [{"role": "user", "content": "a <b> é"}, {"role": "skip", "content": "c"}]


@pytest.mark.parametrize("source", TEMPLATES)
def test_templates_render_as_the_library_renders_them(source: str) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    expected, _ = utils.render_jinja_template([MESSAGES], chat_template=source, eos_token="</s>")
    assert ChatTemplate(source, {"eos_token": "</s>"}).render(MESSAGES) == expected[0]


def test_template_may_refuse_messages() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(TemplateFailed, match="roles must alternate"):
        template.render(MESSAGES)


def test_template_is_in_a_sandbox() -> None:
    with pytest.raises(TemplateFailed):
        ChatTemplate("{{ ''.__class__.__mro__[1].__subclasses__() }}").render(MESSAGES)
    with pytest.raises(TemplateFailed):
        ChatTemplate("{{ messages.append(1) }}").render(MESSAGES)


def test_broken_template_is_named() -> None:
    with pytest.raises(TemplateFailed, match="chat template"):
        ChatTemplate("{% if %}")


def test_split_characters_come_whole_or_not_at_all(library: Library) -> None:
    stream = TextStream(library)
    pushed = [stream.push([byte]) for byte in f"a{SMILE}b".encode()]
    assert pushed == ["a", "", "", "", SMILE, "b"]
    cut = TextStream(library)
    assert "".join(cut.push([byte]) for byte in SMILE.encode()[:3]) + cut.flush() == ""


def test_special_tokens_are_not_text(library: Library) -> None:
    assert TextStream(library).push([104, 257]) == "h"
    assert TextStream(library, skip_special=False).push([104, 257]) == "h<|im_end|>"


def test_stop_string_over_token_borders(library: Library) -> None:
    stream = TextStream(library, ["END", "nd!"])
    pushed = [stream.push([byte]) for byte in b"an END of"]
    assert "".join(pushed) == "an "
    assert stream.stopped
    assert stream.flush() == ""


def test_what_only_began_like_a_stop_string_is_text_in_the_end() -> None:
    finder = StopFinder(["abcd"])
    assert [finder.push(part) for part in ("xab", "c", "e", "ab")] == ["x", "", "abce", ""]
    assert finder.flush() == "ab"
    assert finder.found is None


def test_first_of_several_stops_counts() -> None:
    finder = StopFinder(["later", "one"])
    assert finder.push("this one comes later") == "this "
    assert finder.found == "one"


@pytest.fixture
def conversations() -> list[list[dict[str, str]]]:
    """Twenty of one to four turns, over plain, accented, empty, numeric, code, marker and Chinese text."""
    texts = ("hello", "héllo wörld 😀", "", "1234567890 12.5", "def f(x):\n\treturn x  # ok", "<|im_end|>", "中文字符")
    found = []
    for number in range(20):
        messages = [{"role": "system", "content": texts[number % 7]}]
        for turn in range(number % 4 + 1):
            messages.append({"role": "user", "content": texts[(number + turn) % 7]})
            messages.append({"role": "assistant", "content": texts[(number + 2 * turn) % 7]})
        found.append(messages)
    return found


def test_case_59_router_tokens_are_the_models_tokens(conversations: list[list[dict[str, str]]]) -> None:
    """Position by position, against the library that engines use."""
    transformers = pytest.importorskip("transformers")
    try:
        folder = prepare()
    except ModelMissing as error:
        pytest.skip(str(error))
    tokenizer = load_tokenizer(str(folder))
    reference = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    reference.chat_template = (folder / "chat_template.jinja").read_text()
    for messages in conversations:
        expected = reference.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        assert token_list(asyncio.run(tokenizer.encode_chat(messages)).packed) == list(expected)
