"""How many experts a model routes each token to, from its `config.json`."""

import json
from pathlib import Path

_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts")
_ALL = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")


def experts_of(folder: Path) -> tuple[int, int]:
    """(k, E); (0, 0) for a dense model and where the configuration does not say or cannot be read."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return 0, 0
    text = config.get("text_config", config) if isinstance(config, dict) else {}
    found = [next((text[name] for name in names if isinstance(text.get(name), int)), 0) for names in (_PER_TOKEN, _ALL)]
    k, total = found
    return (k, total) if 0 < k < total else (0, 0)
