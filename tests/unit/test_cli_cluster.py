"""What a local cluster consists of: phases, memory, settings by hand, TOML."""

import tomllib
from pathlib import Path

import pytest

from schemas.phase import Phase
from services.cli.cluster import toml
from services.cli.cluster.catalogue import NodePlan, Places, ServiceSpec, default_split, services_of
from services.cli.cluster.overrides import OverrideError, apply_overrides
from services.cli.cluster.sizes import SizeError, initial_phases, kv_token_bytes

PLACES = Places(
    nats_url="nats://127.0.0.1:1",
    keys=Path("/keys"),
    sockets=Path("/sockets"),
    arenas=Path("/dev/shm"),
    state=Path("/state"),
)


def plan(nodes: int) -> NodePlan:
    return NodePlan(
        engine="timed",
        model="",
        model_name="timed",
        block_size=16,
        block_bytes=4096,
        l2_tokens=1024,
        phases=default_split(nodes),
    )


@pytest.mark.parametrize(("nodes", "split"), [(2, (1, 1)), (3, (2, 1)), (4, (2, 2)), (9, (6, 3)), (16, (10, 6))])
def test_two_thirds_of_the_nodes_prefill(nodes: int, split: tuple[int, int]) -> None:
    phases = list(default_split(nodes).values())
    assert (phases.count(Phase.PREFILL), phases.count(Phase.DECODE)) == split


def test_a_single_node_serves_both() -> None:
    assert default_split(1) == {"node-0": Phase.BOTH}


def test_a_split_of_other_nodes_is_refused() -> None:
    with pytest.raises(SizeError, match="split 2P2D is not one of 3 nodes"):
        initial_phases(3, "2P2D")
    with pytest.raises(SizeError, match="not of the form"):
        initial_phases(3, "x")
    assert list(initial_phases(3, "1P2D").values()) == [Phase.PREFILL, Phase.DECODE, Phase.DECODE]


def test_every_service_has_a_name_and_a_key_of_its_own() -> None:
    specs = services_of(PLACES, plan(3))
    assert [spec.name for spec in specs if spec.kind == "engine"] == [f"engine-node-{i}" for i in range(3)]
    assert len({spec.name for spec in specs}) == len(specs) == 9
    assert len({spec.settings["nats_nkey"] for spec in specs}) == 9
    assert [spec.stage for spec in specs] == sorted(spec.stage for spec in specs)


def test_a_setting_is_changed_for_one_service_or_for_all_of_its_kind() -> None:
    specs = services_of(PLACES, plan(2))
    changed = apply_overrides(
        specs, ["kvpool.capacity_blocks=7", "kvpool-node-1.log_level=debug", "engine.timed.speed=2"]
    )
    pools = [spec.settings for spec in changed if spec.kind == "kvpool"]
    assert [pool["capacity_blocks"] for pool in pools] == [7, 7]
    assert [pool.get("log_level") for pool in pools] == [None, "debug"]
    assert all(spec.settings["timed"]["speed"] == 2 for spec in changed if spec.kind == "engine")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("speed=2", "expected SERVICE.KEY=VALUE"),
        ("engines.speed=2", "no service 'engines'; there are .*engine"),
        ("engine.phase.x=2", "phase = 'prefill' is no table"),
    ],
)
def test_a_setting_that_cannot_be_is_named(text: str, error: str) -> None:
    with pytest.raises(OverrideError, match=error):
        apply_overrides(services_of(PLACES, plan(2)), [text])


def test_settings_survive_toml() -> None:
    values = {
        "text": 'a "quoted" \\ line\n',
        "number": 3,
        "share": 0.25,
        "flag": True,
        "list": ["a", "b"],
        "table": {"inner": {"deep": 1}, "x": "y"},
    }
    assert tomllib.loads(toml.dumps(values)) == values
    with pytest.raises(TypeError, match="no TOML for None"):
        toml.dumps({"x": None})


def test_kv_bytes_come_from_the_model_s_own_description(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"num_hidden_layers": 30, "num_attention_heads": 9, "hidden_size": 576, "num_key_value_heads": 3}'
    )
    assert kv_token_bytes(tmp_path) == 46_080
    (tmp_path / "config.json").write_text(
        '{"model_type": "qwen3_vl", "vision_config": {"hidden_size": 1024}, "text_config": '
        '{"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "head_dim": 16}}'
    )
    assert kv_token_bytes(tmp_path) == 2 * 2 * 4 * 16 * 4, "a model that takes images says it of its language model"
    with pytest.raises(SizeError, match="does not describe a model"):
        kv_token_bytes(tmp_path / "none")


def test_commands_and_modules_belong_together() -> None:
    spec: ServiceSpec = services_of(PLACES, plan(1))[0]
    assert (spec.command, spec.module, spec.file) == ("ei-kvpool", "services.kvpool.__main__", "kvpool-node-0.toml")
