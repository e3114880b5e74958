"""Settings: a file, the environment over it, every mistake named."""

from pathlib import Path
from typing import Annotated, ClassVar

import msgspec
import pytest
from msgspec import Meta

from services.settings import ServiceSettings, SettingsError, load, read_seed


class Limits(msgspec.Struct, kw_only=True):
    open_requests: Annotated[int, Meta(ge=1)] = 1000
    note: str = ""


class DemoSettings(ServiceSettings, kw_only=True):
    service: ClassVar[str] = "demo"

    window_s: Annotated[float, Meta(gt=0)] = 600.0
    nodes: list[str] = []
    limits: Limits = msgspec.field(default_factory=Limits)
    model: str | None = None
    rates: dict[str, float] = {}


def written(path: Path, text: str) -> Path:
    file = path / "demo.toml"
    file.write_text(text)
    return file


def test_defaults_without_file_or_environment() -> None:
    settings = load(DemoSettings, None, {})
    assert settings.name == "demo"
    assert settings.nats_url == "nats://127.0.0.1:4222"
    assert (settings.partition, settings.http_port, settings.drain_s) == ("p0", 0, 30.0)
    assert settings.limits.open_requests == 1000


def test_environment_goes_over_the_file(tmp_path: Path) -> None:
    file = written(tmp_path, 'name = "r1"\nwindow_s = 60\nnodes = ["a"]\n[limits]\nopen_requests = 5\nnote = "file"\n')
    settings = load(
        DemoSettings,
        file,
        {
            "EI_WINDOW_S": "30.5",
            "EI_LIMITS__OPEN_REQUESTS": "7",
            "EI_NODES": '["b", "c"]',
            "EI_RATES": '{"x": 1}',
            "EI_MODEL": "smol",
            "EI_DEBUG_CHECKS": "true",
            "EI_ANOTHER_PROGRAM": "1",
            "HOME": "/",
        },
    )
    assert (settings.name, settings.window_s, settings.nodes) == ("r1", 30.5, ["b", "c"])
    assert (settings.limits.open_requests, settings.limits.note) == (7, "file")
    assert (settings.rates, settings.model, settings.debug_checks) == ({"x": 1.0}, "smol", True)


@pytest.mark.parametrize(
    ("text", "environ", "words"),
    [
        ("window = 5", {}, ["unknown setting window = 5", "window_s"]),
        ("[limits]\nopen = 5", {}, ["unknown setting limits.open = 5", "open_requests"]),
        ("window_s = 0", {}, ["window_s = 0", "> 0"]),
        ('window_s = "long"', {}, ["window_s = 'long'", "Expected `float`"]),
        ("[limits]\nopen_requests = 0", {}, ["limits.open_requests = 0", ">= 1"]),
        ("http_port = 70000", {}, ["http_port", "70000", "65535"]),
        ('name = "Router 1"', {}, ["name", "'Router 1'", "[a-z0-9-]"]),
        ('log_level = "loud"', {}, ["log_level", "'loud'", "warning"]),
        ("drain_s = -1", {}, ["drain_s", "-1"]),
        ("", {"EI_WINDOW_S": "soon"}, ["EI_WINDOW_S = 'soon'", "float"]),
        ("", {"EI_LIMITS__OPEN_REQUESTS": "many"}, ["EI_LIMITS__OPEN_REQUESTS = 'many'", "int"]),
        ("", {"EI_NODES": "a,b"}, ["EI_NODES = 'a,b'", "array"]),
        ("window_s = ", {}, ["is not TOML"]),
    ],
)
def test_mistakes_name_key_value_and_expectation(
    tmp_path: Path, text: str, environ: dict[str, str], words: list[str]
) -> None:
    with pytest.raises(SettingsError) as caught:
        load(DemoSettings, written(tmp_path, text), environ)
    assert [word for word in words if word not in str(caught.value)] == []


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"cannot read .*none\.toml: No such file"):
        load(DemoSettings, tmp_path / "none.toml", {})


def test_secrets_are_not_shown(tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as caught:
        load(DemoSettings, written(tmp_path, "nats_nkey = 77123"), {})
    assert "77123" not in str(caught.value)
    assert "nats_nkey = ***" in str(caught.value)


def test_a_seed_is_given_as_such_or_in_a_file(tmp_path: Path) -> None:
    seed = "SUAEXAMPLEEXAMPLE"
    file = tmp_path / "router.nk"
    file.write_text(seed + "\n")
    assert read_seed("") is None
    assert read_seed(seed) == seed
    assert read_seed(str(file)) == seed
    with pytest.raises(SettingsError, match=r"cannot read the seed file .*none\.nk"):
        read_seed(str(tmp_path / "none.nk"))
    file.write_text("UABC")
    with pytest.raises(SettingsError, match="does not hold a user seed"):
        read_seed(str(file))
