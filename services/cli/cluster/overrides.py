"""`--set SERVICE.KEY=VALUE`: settings changed by hand, for every service of that kind or one by its name."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from services.cli.cluster.catalogue import ServiceSpec


class OverrideError(Exception):
    """An override that changes nothing or cannot be read; the text names it."""


def apply_overrides(specs: Sequence[ServiceSpec], overrides: Sequence[str]) -> list[ServiceSpec]:
    """The specs with every override applied; a value is JSON, or text as it stands."""
    changed = list(specs)
    for text in overrides:
        path, equals, raw = text.partition("=")
        service, dot, key = path.partition(".")
        if not (equals and dot and key):
            raise OverrideError(f"--set {text}: expected SERVICE.KEY=VALUE, such as engine.max_running=8")
        hits = [index for index, spec in enumerate(changed) if service in (spec.kind, spec.name)]
        if not hits:
            known = ", ".join(sorted({spec.kind.value for spec in changed} | {spec.name for spec in changed}))
            raise OverrideError(f"--set {text}: no service {service!r}; there are {known}")
        for index in hits:
            settings = _with(changed[index].settings, key.split("."), _value(raw))
            changed[index] = replace(changed[index], settings=settings)
    return changed


def _value(raw: str) -> Any:
    try:
        return msgspec.json.decode(raw.encode())
    except msgspec.DecodeError:
        return raw


def _with(settings: dict[str, Any], keys: list[str], value: Any) -> dict[str, Any]:
    head, *rest = keys
    if not rest:
        return settings | {head: value}
    inner = settings.get(head, {})
    if not isinstance(inner, dict):
        raise OverrideError(f"{head} = {inner!r} is no table")
    return settings | {head: _with(inner, rest, value)}
