"""How much memory the nodes of a local cluster get, and what a block of their model takes."""

from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from schemas.phase import Phase, Split
from services.cli.cluster.catalogue import NodePlan, default_split, phases_of
from services.engine.sglang.config import SglangSettings
from services.engine.sglang.model import ModelMissing, prepare
from services.engine.timed.script import load_script
from services.engine.timed.settings import TimedSettings

FLOAT32_BYTES = 4
L2_TOKENS = {"timed": 65_536, "sglang": 8_192}
"""Tokens of host memory per node: 16 MB for a timed node, 380 MB for SmolLM2 in float32."""
SCRIPT_CONTEXT, SCRIPT_BLOCK_BYTES = 262_144, 256
"""A node that plays a script: tokens of one context (bytes, without a tokenizer), and its blocks, kept small."""


class SizeError(Exception):
    """A cluster that cannot be made; the text names value and limit."""


class _ModelConfig(msgspec.Struct):
    """What KV takes, from a Hugging Face `config.json`."""

    num_hidden_layers: Annotated[int, Meta(ge=1)]
    num_attention_heads: Annotated[int, Meta(ge=1)]
    hidden_size: Annotated[int, Meta(ge=1)]
    num_key_value_heads: int | None = None
    head_dim: int | None = None

    @property
    def token_bytes(self) -> int:
        """Bytes of KV of one token in float32."""
        heads = self.num_key_value_heads or self.num_attention_heads
        size = self.head_dim or self.hidden_size // self.num_attention_heads
        return 2 * self.num_hidden_layers * heads * size * FLOAT32_BYTES


class _Nested(msgspec.Struct):
    """A model that takes images says what its language model is in a table of its own."""

    text_config: _ModelConfig | None = None


def kv_token_bytes(model: Path) -> int:
    """Bytes of KV per token of the model in this folder; SizeError names what is wrong with it."""
    path = model / "config.json"
    try:
        data = path.read_bytes()
        text = msgspec.json.decode(data, type=_Nested).text_config
        return (text or msgspec.json.decode(data, type=_ModelConfig)).token_bytes
    except (OSError, msgspec.MsgspecError) as error:
        raise SizeError(f"{path} does not describe a model: {error}") from error


def initial_phases(nodes: int, split: str | None) -> dict[str, Phase]:
    """Every node's first phase; SizeError when the split is not one of so many nodes."""
    if split is None:
        return default_split(nodes)
    try:
        wanted = Split.parse(split)
    except ValueError as error:
        raise SizeError(str(error)) from error
    if wanted.prefill + wanted.decode != nodes or not (wanted.prefill and wanted.decode):
        raise SizeError(f"split {split} is not one of {nodes} nodes with at least one of each phase")
    return phases_of(wanted)


def plan_nodes(nodes: int, engine: str, model: Path | None, split: str | None, script: Path | None = None) -> NodePlan:
    """What every node of a local cluster runs. SizeError when the model, the split or the script cannot be used."""
    phases = initial_phases(nodes, split)
    if engine == "timed":
        return _timed(model, phases, script)
    if script is not None:
        raise SizeError(f"--script {script} is played by the timed engine only: --engine timed")
    defaults = SglangSettings()
    try:
        folder = model.resolve() if model is not None else prepare()
    except ModelMissing as error:
        raise SizeError(f"{error} (or take the timed engine: --engine timed)") from error
    return NodePlan(
        engine=engine,
        model=str(folder),
        model_name=defaults.model if model is None else folder.name.lower(),
        block_size=defaults.block_size,
        block_bytes=kv_token_bytes(folder) * defaults.block_size,
        l2_tokens=L2_TOKENS[engine],
        phases=phases,
    )


def _timed(model: Path | None, phases: dict[str, Phase], script: Path | None) -> NodePlan:
    """Nodes without a model; `model` lends its tokenizer. Who plays a script serves real programs: long contexts."""
    timed = TimedSettings()
    told: dict[str, Any] = {"tokenizer": str(model.resolve())} if model is not None else {}
    l2_tokens, block_bytes = L2_TOKENS["timed"], timed.block_bytes
    if script is not None:
        told |= {"script": str(script.resolve()), "max_context_tokens": SCRIPT_CONTEXT, "l1_tokens": 4 * SCRIPT_CONTEXT}
        l2_tokens, block_bytes = 4 * SCRIPT_CONTEXT, SCRIPT_BLOCK_BYTES
    try:
        load_script(TimedSettings(**told))
    except ValueError as error:
        raise SizeError(str(error)) from error
    return NodePlan(
        engine="timed",
        model="" if model is None else str(model.resolve()),
        model_name=timed.model,
        block_size=timed.block_size,
        block_bytes=block_bytes,
        l2_tokens=l2_tokens,
        phases=phases,
        timed=told,
    )
