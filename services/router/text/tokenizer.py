"""A model's tokenizer with its chat template, from a folder, a GGUF file, or our own bytes."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Library

from services.router.text.byte_tokenizer import END, END_OF_TEXT, byte_tokenizer
from services.router.text.chat_template import CHATML, ChatTemplate
from services.router.text.layout import Prompt, Shown, expanded, laid_out
from services.router.text.segments import Cuts, SegmentCache, encode_all

BYTES = "byte"
OFF_LOOP_CHARACTERS = 2000
"""Longer texts are encoded in a thread: the library lets go of the interpreter there."""
CACHE_BYTES = 256 << 20
"""What texts and tokens of segments may take."""


_PROCESSORS = ("preprocessor_config.json", "processor_config.json")
"""A folder with one of these is of a model with a processor of its own, for more than text."""


class UnusableTokenizer(ValueError):
    """A tokenizer that cannot be loaded; the text names the path and what was expected."""


class NotText(ValueError):
    """A string with lone surrogates: no tokenizer can encode it."""


@dataclass(frozen=True)
class Tokenizer:
    """Encode, render, decode. `stop_ids` end an answer; token ids of a prompt must be below `vocabulary`.

    `plain_special`: tokens are put around a plain prompt. `image_folder`: where the model's processor of images is, ""
    for a model that takes text only. Segments met before are not encoded again.
    """

    library: Library
    template: ChatTemplate
    stop_ids: tuple[int, ...] = ()
    vocabulary: int = 1 << 32
    cuts: Cuts = field(default_factory=lambda: Cuts([], []), repr=False)
    plain_special: bool = False
    image_folder: str = ""
    cache: SegmentCache = field(default_factory=lambda: SegmentCache(CACHE_BYTES), repr=False)
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2, "encode"), repr=False)

    async def encode(self, text: str, *, special: bool) -> bytes:
        """Tokens of `text`, packed as u32 little-endian; `special` adds what the model puts around a plain prompt."""
        if special and self.plain_special:
            (whole,) = await self._encoded([text], special=True)
            return whole
        segments = list(self.cuts.between(text))
        known = [self.cache.get(segment) for segment in segments]
        missing = list({s: None for s, tokens in zip(segments, known, strict=True) if tokens is None})
        if not missing:
            return b"".join(tokens for tokens in known if tokens is not None)
        new = dict(zip(missing, await self._encoded(missing), strict=True))
        for segment, packed in new.items():
            self.cache.put(segment, packed)
        return b"".join(new[s] if tokens is None else tokens for s, tokens in zip(segments, known, strict=True))

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        shown: Sequence[Shown] = (),
        prompt: bool = True,
        begun: str = "",
        **more: Any,
    ) -> Prompt:
        """A conversation as the template renders it; `prompt` False leaves out the opening of an answer.

        `shown`: its images, in order. `begun`: the first words of the answer. `more` goes to the template. NotLaidOut.
        """
        text = self.template.render(messages, add_generation_prompt=prompt, **more)
        return laid_out(await self.encode(expanded(text + begun, shown), special=False), shown)

    def special_tokens(self) -> list[str]:
        """The texts of added tokens."""
        return [token.content for token in self.library.get_added_tokens_decoder().values()]

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of `tokens`, special tokens included."""
        return self.library.decode(list(tokens), skip_special_tokens=False)

    async def _encoded(self, texts: list[str], *, special: bool = False) -> list[bytes]:
        for text in texts:
            _check_text(text)
        if sum(map(len, texts)) <= OFF_LOOP_CHARACTERS:
            return encode_all(self.library, texts, special=special)
        work = asyncio.get_running_loop().run_in_executor
        return await work(self.pool, lambda: encode_all(self.library, texts, special=special))


def load_tokenizer(source: str) -> Tokenizer:
    """Load `byte`, or the one of a Hugging Face folder. UnusableTokenizer names what is wrong."""
    if source == BYTES:
        library = byte_tokenizer()
        ids = (library.token_to_id(text) for text in (END, END_OF_TEXT))
        stop_ids = tuple(number for number in ids if number is not None)
        cuts = Cuts.of(library, json.loads(library.to_str()))
        return Tokenizer(library, ChatTemplate(CHATML), stop_ids, cuts=cuts)
    try:
        return _from_folder(Path(source))
    except (OSError, ValueError) as error:
        raise UnusableTokenizer(f"tokenizer {source!r}: {error}") from error


def _from_folder(folder: Path) -> Tokenizer:
    file = folder / "tokenizer.json"
    if not file.exists():
        raise UnusableTokenizer(f"{file} does not exist; expected {BYTES!r} or a model folder")
    text = file.read_text()
    library = Library.from_str(text)
    library.no_truncation()
    library.no_padding()
    config = _json(folder / "tokenizer_config.json")
    special = {key: _text(config[key]) for key in config if key.endswith("_token") and config[key]}
    source = _template(folder, config)
    return Tokenizer(
        library,
        ChatTemplate(source, special),
        _stop_ids(library, folder, special),
        library.get_vocab_size(with_added_tokens=True),
        cuts=Cuts.of(library, json.loads(text)),
        plain_special=bool(library.encode("", add_special_tokens=True).ids),
        image_folder=str(folder) if any((folder / name).exists() for name in _PROCESSORS) else "",
    )


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise NotText(f"character {error.start} of the text is half of a surrogate pair") from error


def _template(folder: Path, config: Mapping[str, Any]) -> str:
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text()
    found = config.get("chat_template") or _json(folder / "chat_template.json").get("chat_template")
    if isinstance(found, list):
        found = next((entry["template"] for entry in found if entry.get("name") == "default"), None)
    return found or CHATML


def _stop_ids(library: Library, folder: Path, special: Mapping[str, str]) -> tuple[int, ...]:
    """The model's end-of-answer tokens: generation_config.json before the tokenizer's end-of-sequence token."""
    found = _json(folder / "generation_config.json").get("eos_token_id")
    if found is None:
        found = library.token_to_id(special.get("eos_token", ""))
    ids = found if isinstance(found, list) else [found]
    return tuple(number for number in ids if number is not None)


def _json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())) if path.exists() else {}


def _text(token: Any) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)
