"""Writing the TOML that `tomllib` reads: scalars, lists and nested tables of settings."""

import json
from typing import Any


def dumps(values: dict[str, Any]) -> str:
    """Settings as TOML; scalars first, tables after them. TypeError for what TOML has no form for."""
    return "\n".join(_table(values, "")) + "\n"


def _table(values: dict[str, Any], path: str) -> list[str]:
    lines = [f"{key} = {_value(value)}" for key, value in values.items() if not isinstance(value, dict)]
    for key, value in values.items():
        if isinstance(value, dict):
            inner = f"{path}{key}"
            lines += ["", f"[{inner}]", *_table(value, f"{inner}.")]
    return lines


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, list):
        return f"[{', '.join(_value(item) for item in value)}]"
    raise TypeError(f"no TOML for {value!r} of type {type(value).__name__}")
