"""Every message of the wire, found by its decoder: valid ones made from the types, and golden ones kept for ever.

`python -m tests.contract.messages` records golden bytes of messages that have none yet; recorded ones never change.
"""

import importlib
import json
import pkgutil
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import strategies as st
from msgspec import inspect

import schemas
from schemas.codec import Decoder

GOLDEN = Path(__file__).parents[1] / "data" / "golden_messages.json"
_KEYS = [b"", bytes(range(32))]
_RULES: dict[tuple[str, str], list[Any]] = {
    ("ServeRequest", "tokens"): [b""],
    ("ServeRequest", "phase"): ["prefill", "decode"],
}
"""Fields that depend on others of their message: values that fit any."""


def decoders() -> dict[str, Decoder[Any]]:
    """The decoder of each message type, by the name of the type."""
    modules = [importlib.import_module(f"schemas.{module.name}") for module in pkgutil.iter_modules(schemas.__path__)]
    found = [value for module in modules for value in vars(module).values() if isinstance(value, Decoder)]
    return {decoder.kind.__name__: decoder for decoder in found}


DECODERS = decoders()


@cache
def valid(kind: type) -> st.SearchStrategy[dict[str, Any]]:
    """Maps that decode as `kind`: required keys always, others sometimes."""
    return _map(inspect.type_info(kind))


def _map(info: Any) -> st.SearchStrategy[dict[str, Any]]:
    name = info.cls.__name__
    required, optional = {}, {}
    for field in info.fields:
        values = _RULES.get((name, field.name))
        made = st.sampled_from(values) if values else _value(field.type)
        (required if field.required else optional)[field.encode_name] = made
    if "v" in optional:
        optional["v"] = st.just(1)
    return st.fixed_dictionaries(required, optional=optional)


def _value(info: Any) -> st.SearchStrategy[Any]:
    if isinstance(info, inspect.StructType):
        return _tuple_of(info) if info.array_like else _map(info)
    if isinstance(info, inspect.UnionType):
        return st.one_of(*(_value(arm) for arm in info.types))
    if isinstance(info, inspect.ListType):
        return st.lists(_value(info.item_type), max_size=3)
    if isinstance(info, inspect.TupleType):
        return st.tuples(*(_value(item) for item in info.item_types)).map(list)
    if isinstance(info, inspect.DictType):
        return st.dictionaries(_value(info.key_type), _value(info.value_type), max_size=3)
    if isinstance(info, inspect.EnumType):
        return st.sampled_from([member.value for member in info.cls])
    return _scalar(info)


def _tuple_of(info: Any) -> st.SearchStrategy[Any]:
    return st.tuples(*(_value(field.type) for field in info.fields)).map(list)


def _scalar(info: Any) -> st.SearchStrategy[Any]:
    if isinstance(info, inspect.NoneType):
        return st.none()
    if isinstance(info, inspect.BoolType):
        return st.booleans()
    if isinstance(info, inspect.IntType):
        return st.integers(info.ge or 0, info.le if info.le is not None else 2**63)
    if isinstance(info, inspect.FloatType):
        low = info.ge if info.ge is not None else (info.gt if info.gt is not None else -1e12)
        above = info.gt is not None
        return st.floats(low, info.le or 1e12, exclude_min=above, allow_nan=False)
    if isinstance(info, inspect.StrType):
        return st.text(min_size=info.min_length or 0, max_size=min(info.max_length or 12, 12))
    if isinstance(info, inspect.BytesType):
        return st.sampled_from([key for key in _KEYS if len(key) >= (info.min_length or 0)])
    raise TypeError(f"no rule to make a {info}")


def filled(kind: type) -> dict[str, Any]:
    """One map of `kind` with every key set, always the same."""
    return _filled(inspect.type_info(kind))


def _filled(info: Any, name: str = "", place: int = 1) -> Any:
    if isinstance(info, inspect.StructType):
        fields = enumerate(info.fields, start=1)
        rules = {field: values[0] for (cls, field), values in _RULES.items() if cls == info.cls.__name__}
        made = {f.encode_name: rules.get(f.name, _filled(f.type, f.encode_name, at)) for at, f in fields}
        return list(made.values()) if info.array_like else made | ({"v": 1} if "v" in made else {})
    if isinstance(info, inspect.UnionType):
        return _filled(next(t for t in info.types if not isinstance(t, inspect.NoneType)), name, place)
    if isinstance(info, inspect.ListType):
        return [_filled(info.item_type, name, place)]
    if isinstance(info, inspect.TupleType):
        return [_filled(item, name, at) for at, item in enumerate(info.item_types, start=1)]
    if isinstance(info, inspect.DictType):
        return {"key": _filled(info.value_type, name, place)}
    if isinstance(info, inspect.EnumType):
        return list(info.cls)[-1].value
    if isinstance(info, inspect.BoolType):
        return True
    if isinstance(info, inspect.FloatType):
        return min(place + 0.5, info.le or 1e9)
    return {inspect.IntType: place, inspect.StrType: name, inspect.BytesType: _KEYS[1]}[type(info)]


def record() -> None:
    """Add golden bytes of messages that have none."""
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    for name, decoder in DECODERS.items():
        golden.setdefault(name, msgspec.msgpack.encode(filled(decoder.kind)).hex())
    GOLDEN.write_text(json.dumps(dict(sorted(golden.items())), indent=1) + "\n")


if __name__ == "__main__":
    record()
