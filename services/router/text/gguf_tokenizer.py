"""The tokenizer inside a GGUF file, written once as the files a Hugging Face folder would have."""

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

_CONTROL = 3
_PRE_TOKENIZERS: dict[str, list[dict[str, Any]]] = {
    "smollm": [{"type": "Digits", "individual_digits": True}],
    "gpt-2": [],
}
"""By name in the file: what splits text before byte-level BPE."""


class UnusableGguf(ValueError):
    """A GGUF file whose tokenizer cannot be built here; the text names what was found."""


def cache_dir() -> Path:
    """`$XDG_CACHE_HOME/evolving-infra/tokenizers`, else below `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "evolving-infra" / "tokenizers"


def gguf_folder(path: Path, cache: Path | None = None) -> Path:
    """The folder with the tokenizer of `path`, written on first use (some seconds). UnusableGguf, OSError."""
    stat = path.stat()
    name = hashlib.sha256(f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:24]
    folder = (cache or cache_dir()) / name
    if not (folder / "tokenizer.json").exists():
        write_folder(read_metadata(path), folder)
    return folder


def read_metadata(path: Path) -> dict[str, Any]:
    """The tokenizer's keys of a GGUF file."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise UnusableGguf(f"{path}: reading it needs the package gguf (pip install gguf)") from error
    try:
        fields = GGUFReader(path).fields
    except (ValueError, KeyError, IndexError) as error:
        raise UnusableGguf(f"{path} is not a GGUF file: {error}") from error
    return {key: field.contents() for key, field in fields.items() if key.startswith("tokenizer.")}


def write_folder(metadata: dict[str, Any], folder: Path) -> None:
    """Write tokenizer.json last and whole, so that a folder with it is complete."""
    tokenizer = tokenizer_json(metadata)
    tokens = metadata["tokenizer.ggml.tokens"]
    named = (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding"))
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in named}
    config: dict[str, Any] = {name: tokens[number] for name, number in ids.items() if number is not None}
    folder.mkdir(parents=True, exist_ok=True)
    if "tokenizer.chat_template" in metadata:
        (folder / "chat_template.jinja").write_text(metadata["tokenizer.chat_template"])
    (folder / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False))
    with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as partial:
        json.dump(tokenizer, partial, ensure_ascii=False)
    Path(partial.name).rename(folder / "tokenizer.json")


def tokenizer_json(metadata: dict[str, Any]) -> dict[str, Any]:
    """The content of tokenizer.json: byte-level BPE with the file's tokens and merges."""
    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "gpt-2")
    if model != "gpt2" or pre not in _PRE_TOKENIZERS:
        raise UnusableGguf(
            f"tokenizer {model!r} with pre-tokenizer {pre!r}; known are gpt2 with {', '.join(_PRE_TOKENIZERS)}."
            " Point `tokenizer` at the model's Hugging Face folder instead"
        )
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    kinds: list[int] = metadata["tokenizer.ggml.token_type"]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    control = [index for index, kind in enumerate(kinds) if kind == _CONTROL]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": index, "content": tokens[index], **flags} for index in control],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*_PRE_TOKENIZERS[pre], byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": metadata["tokenizer.ggml.merges"],
        },
    }
