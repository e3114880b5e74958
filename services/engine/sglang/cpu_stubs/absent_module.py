"""Stands in for a package that exists only for GPUs: imports succeed, any use of what is imported fails by name.

On a machine without GPU SGLang imports `sgl_kernel` and `torchvision` at module level but calls neither. This folder
is put on PYTHONPATH by our launcher, in CPU mode only, so that every process SGLang spawns finds it.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any, NoReturn


class AbsentType(type):
    """A class of the absent package: usable in annotations and isinstance, never true, never callable in earnest."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class AbsentName:
    """A function or value of the absent package."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name

    def __getattr__(self, name: str) -> "AbsentName":
        if name.startswith("__"):
            raise AttributeError(name)
        return AbsentName(f"{self.__name__}.{name}")

    def __call__(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{self.__name__} needs a GPU build that is not installed on this machine")


class AbsentModule(types.ModuleType):
    """A module of the absent package; submodules and names appear when asked for."""

    __version__ = "0.0.0+absent"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[:1].isupper():
            value: Any = AbsentType(name, (), {"__module__": self.__name__})
            setattr(self, name, value)
            return value
        return sys.modules.get(f"{self.__name__}.{name}") or AbsentName(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, package: str) -> None:
        self._prefix = package + "."

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.startswith(self._prefix):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return AbsentModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


def become_absent(name: str) -> None:
    """Turn the package that is being imported into an absent one, its submodules included."""
    sys.modules[name].__class__ = AbsentModule
    sys.meta_path.append(_Finder(name))
