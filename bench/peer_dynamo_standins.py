"""Modules that Dynamo's replay imports and a load-driven planner never uses, stood in for where they are missing.

Among them are ones that no public index has (`aisimulate`). A use of one is an error of the run and is remembered:
no figure comes from a planner that ran without a part of itself.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence

NAMES = frozenset(
    {
        *("aisimulate", "aisimulate_core", "filterpy", "google", "grpc", "kubernetes", "pandas", "plotly"),
        *("pmdarima", "prometheus_api_client", "prophet", "sklearn", "statsmodels"),
    }
)
used: list[str] = []
"""What was called of them."""


class StandInUsed(RuntimeError):
    """Something that is only stood in for was called; the text names it."""


class _Anything(type):
    """A class that can be named, inherited from and looked into, and not called."""

    def __getattr__(cls, name: str) -> "_Anything":
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(f"{cls.__name__}.{name}", (), {})

    def __call__(cls, *args: object, **kwargs: object) -> object:
        used.append(cls.__name__)
        raise StandInUsed(f"{cls.__name__} is stood in for and was called")


class _Module(types.ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> _Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(f"{self.__name__}.{name}", (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        known = fullname.split(".")[0] in NAMES
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if known else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


def stand_in() -> None:
    """From now on a missing module of `NAMES` is stood in for."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
