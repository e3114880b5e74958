"""Tiny models that take images, with random weights, made here; nothing is downloaded.

Every token is a byte, and every answer printable ASCII, so that what was said can be shown again. `qwen`: Qwen3-VL, one
run of placeholders an image, three positions a token, and its eyes' middle layer added to the language model's (deep
stack). `llava`: Pixtral's eyes on a Llama: each row of an image ends with a token of its own.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from services.router.text.byte_tokenizer import byte_tokenizer

Weights = dict[str, npt.NDArray[np.float32]]
VOCABULARY, PRINTABLE = 264, slice(0x20, 0x7F)
HIDDEN, HEADS, KV_HEADS, HEAD, WIDE, LAYERS = 64, 4, 2, 16, 128, 2
EYE_HIDDEN, EYE_HEADS, EYE_WIDE, EYE_LAYERS, PATCH = 32, 2, 64, 2, 16


@dataclass(frozen=True)
class Seeing:
    """How a model shows images: what its template writes for one, whose token `placeholder` its processor repeats.

    `before`: tokens of an image that come before the first placeholder.
    """

    shown: str
    placeholder: str
    before: int
    special: tuple[str, ...]
    files: dict[str, dict[str, Any]]
    shapes: Callable[[], dict[str, tuple[int, ...]]]

    @property
    def template(self) -> str:
        return (
            "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
            "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
            "{% if part.type == 'image' %}" + self.shown + "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
            "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
        )

    def write(self, folder: Path) -> Path:
        """Configuration, tokenizer, processor and weights, in `folder`."""
        from safetensors.numpy import save_file
        from tokenizers import AddedToken

        tokenizer = byte_tokenizer()
        tokenizer.add_special_tokens([AddedToken(name, special=True) for name in self.special])
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "chat_template.jinja").write_text(self.template)
        for name, table in self.files.items():
            (folder / name).write_text(json.dumps(table))
        source = np.random.default_rng(11)
        weights = {name: _weight(source, name, shape) for name, shape in self.shapes().items()}
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        return folder


def _weight(source: np.random.Generator, name: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    if len(shape) == 1:
        return np.full(shape, name.endswith("weight"), np.float32)
    scale = HIDDEN**0.5 if "embed_tokens" in name else 4.0 if "lm_head" in name else 1.0
    deviation = scale / float(np.prod(shape[1:])) ** 0.5
    weight: npt.NDArray[np.float32] = (source.standard_normal(shape) * deviation).astype(np.float32)
    if "lm_head" in name:
        weight[: PRINTABLE.start] = weight[PRINTABLE.stop :] = 0
    return weight


def _language_model(prefix: str, head: str, *, normed: bool) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {
        f"{prefix}.embed_tokens.weight": (VOCABULARY, HIDDEN),
        f"{prefix}.norm.weight": (HIDDEN,),
        head: (VOCABULARY, HIDDEN),
    }
    for layer in range(LAYERS):
        at = f"{prefix}.layers.{layer}"
        found |= {f"{at}.{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
        found |= {f"{at}.self_attn.{name}_proj.weight": (KV_HEADS * HEAD, HIDDEN) for name in "kv"}
        found[f"{at}.self_attn.q_proj.weight"] = (HEADS * HEAD, HIDDEN)
        found[f"{at}.self_attn.o_proj.weight"] = (HIDDEN, HEADS * HEAD)
        found |= {f"{at}.self_attn.{name}_norm.weight": (HEAD,) for name in "qk" if normed}
        found |= {f"{at}.mlp.{name}_proj.weight": (WIDE, HIDDEN) for name in ("gate", "up")}
        found[f"{at}.mlp.down_proj.weight"] = (HIDDEN, WIDE)
    return found


def _linear(name: str, out: int, into: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (out, into), f"{name}.bias": (out,)}


def _norm(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


_ENDS = {"bos_token_id": 258, "eos_token_id": 257, "pad_token_id": 258}
_TEXT = _ENDS | {
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "intermediate_size": WIDE,
    "num_hidden_layers": LAYERS,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
_TOP = {"tie_word_embeddings": False, "torch_dtype": "float32", "eos_token_id": 257}
_TOKENIZER = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}


def _qwen_shapes() -> dict[str, tuple[int, ...]]:
    eyes, merged = "model.visual", 4 * EYE_HIDDEN
    found = _language_model("model.language_model", "lm_head.weight", normed=True)
    found |= {
        f"{eyes}.patch_embed.proj.weight": (EYE_HIDDEN, 3, 2, PATCH, PATCH),
        f"{eyes}.patch_embed.proj.bias": (EYE_HIDDEN,),
        f"{eyes}.pos_embed.weight": (64, EYE_HIDDEN),
    }
    for layer in range(EYE_LAYERS):
        at = f"{eyes}.blocks.{layer}"
        found |= _norm(f"{at}.norm1", EYE_HIDDEN) | _norm(f"{at}.norm2", EYE_HIDDEN)
        found |= _linear(f"{at}.attn.qkv", 3 * EYE_HIDDEN, EYE_HIDDEN)
        found |= _linear(f"{at}.attn.proj", EYE_HIDDEN, EYE_HIDDEN)
        found |= _linear(f"{at}.mlp.linear_fc1", EYE_WIDE, EYE_HIDDEN)
        found |= _linear(f"{at}.mlp.linear_fc2", EYE_HIDDEN, EYE_WIDE)
    for at, width in ((f"{eyes}.merger", EYE_HIDDEN), (f"{eyes}.deepstack_merger_list.0", merged)):
        found |= _norm(f"{at}.norm", width)
        found |= _linear(f"{at}.linear_fc1", merged, merged) | _linear(f"{at}.linear_fc2", HIDDEN, merged)
    return found


_QWEN_IMAGES = {"patch_size": PATCH, "merge_size": 2, "temporal_patch_size": 2, "processor_class": "Qwen3VLProcessor"}
QWEN = Seeing(
    shown="<|vision_start|><|image_pad|><|vision_end|>",
    placeholder="<|image_pad|>",
    before=1,
    special=("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    shapes=_qwen_shapes,
    files={
        "config.json": _TOP
        | {
            "architectures": ["Qwen3VLForConditionalGeneration"],
            "model_type": "qwen3_vl",
            "vision_start_token_id": 259,
            "vision_end_token_id": 260,
            "image_token_id": 261,
            "video_token_id": 262,
            "text_config": _TEXT
            | {
                "model_type": "qwen3_vl_text",
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 10_000.0,
                    "mrope_section": [2, 3, 3],
                    "mrope_interleaved": True,
                },
            },
            "vision_config": {
                "model_type": "qwen3_vl_vision",
                "depth": EYE_LAYERS,
                "hidden_size": EYE_HIDDEN,
                "intermediate_size": EYE_WIDE,
                "num_heads": EYE_HEADS,
                "out_hidden_size": HIDDEN,
                "patch_size": PATCH,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
                "in_channels": 3,
                "num_position_embeddings": 64,
                "deepstack_visual_indexes": [0],
                "hidden_act": "gelu_pytorch_tanh",
            },
        },
        "generation_config.json": _ENDS,
        "tokenizer_config.json": _TOKENIZER
        | {
            "processor_class": "Qwen3VLProcessor",
            "image_token": "<|image_pad|>",
            "video_token": "<|video_pad|>",
            "vision_bos_token": "<|vision_start|>",
            "vision_eos_token": "<|vision_end|>",
        },
        "preprocessor_config.json": _QWEN_IMAGES
        | {
            "image_processor_type": "Qwen2VLImageProcessor",
            "size": {"shortest_edge": (2 * PATCH) ** 2, "longest_edge": (8 * PATCH) ** 2},
        },
        "video_preprocessor_config.json": _QWEN_IMAGES | {"video_processor_type": "Qwen3VLVideoProcessor"},
    },
)


def _llava_shapes() -> dict[str, tuple[int, ...]]:
    found = _language_model("language_model.model", "language_model.lm_head.weight", normed=False)
    found |= _linear("multi_modal_projector.linear_1", HIDDEN, EYE_HIDDEN)
    found |= _linear("multi_modal_projector.linear_2", HIDDEN, HIDDEN)
    found |= {
        "vision_tower.patch_conv.weight": (EYE_HIDDEN, 3, PATCH, PATCH),
        "vision_tower.ln_pre.weight": (EYE_HIDDEN,),
    }
    for layer in range(EYE_LAYERS):
        at = f"vision_tower.transformer.layers.{layer}"
        found |= {f"{at}.{name}_norm.weight": (EYE_HIDDEN,) for name in ("attention", "ffn")}
        found |= {f"{at}.attention.{name}_proj.weight": (EYE_HIDDEN, EYE_HIDDEN) for name in "qkvo"}
        found |= {f"{at}.feed_forward.{name}_proj.weight": (EYE_WIDE, EYE_HIDDEN) for name in ("gate", "up")}
        found[f"{at}.feed_forward.down_proj.weight"] = (EYE_HIDDEN, EYE_WIDE)
    return found


LLAVA = Seeing(
    shown="[IMG]",
    placeholder="[IMG]",
    before=0,
    special=("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    shapes=_llava_shapes,
    files={
        "config.json": _TOP
        | {
            "architectures": ["LlavaForConditionalGeneration"],
            "model_type": "llava",
            "image_token_index": 259,
            "projector_hidden_act": "gelu",
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
            "multimodal_projector_bias": True,
            "text_config": _TEXT | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
            "vision_config": {
                "model_type": "pixtral",
                "hidden_size": EYE_HIDDEN,
                "num_attention_heads": EYE_HEADS,
                "head_dim": EYE_HIDDEN // EYE_HEADS,
                "intermediate_size": EYE_WIDE,
                "num_hidden_layers": EYE_LAYERS,
                "num_channels": 3,
                "image_size": 4 * PATCH,
                "patch_size": PATCH,
                "hidden_act": "silu",
                "torch_dtype": "float32",
            },
        },
        "generation_config.json": _ENDS,
        "tokenizer_config.json": _TOKENIZER | {"processor_class": "PixtralProcessor"},
        "processor_config.json": {
            "processor_class": "PixtralProcessor",
            "image_token": "[IMG]",
            "image_break_token": "[IMG_BREAK]",
            "image_end_token": "[IMG_END]",
            "patch_size": PATCH,
            "spatial_merge_size": 1,
        },
        "preprocessor_config.json": {
            "image_processor_type": "PixtralImageProcessor",
            "processor_class": "PixtralProcessor",
            "patch_size": {"height": PATCH, "width": PATCH},
            "size": {"longest_edge": 4 * PATCH},
        },
    },
)
