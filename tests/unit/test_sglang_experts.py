"""k and E from a model's configuration."""

import json
from pathlib import Path
from typing import Any

import pytest

from services.engine.sglang.experts import experts_of


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"num_experts_per_tok": 8, "n_routed_experts": 256}, (8, 256)),
        ({"text_config": {"num_experts_per_tok": 2, "num_local_experts": 8}}, (2, 8)),
        ({"hidden_size": 576}, (0, 0)),
        ({"num_experts_per_tok": 1, "num_experts": 1}, (0, 0)),
        ([], (0, 0)),
    ],
)
def test_experts(tmp_path: Path, config: Any, found: tuple[int, int]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert experts_of(tmp_path) == found


def test_no_configuration_is_a_dense_model(tmp_path: Path) -> None:
    assert experts_of(tmp_path) == (0, 0)
