"""torch and transformers in processes that serve, without the parts that only compile or train.

transformers' models import torch's compiler and distributed tensors, which take some 45 MB and are never called here.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
from transformers import utils
from transformers.utils import import_utils

_COMPILER = "torch._dynamo"
# The one module of the compiler that transformers needs; others bring the whole compiler with them.
_NEEDED = f"{_COMPILER}._trace_wrapped_higher_order_op"


class _NoCompiler(ModuleType):
    """Stands in for torch's compiler until something is asked of it that only the real one has."""

    def __init__(self, directory: Path) -> None:
        super().__init__(_COMPILER)
        self.__path__ = [str(directory)]

    def disable(self, function: Any = None, *_: Any, **__: Any) -> Any:
        """Decorator of functions that are not to be compiled."""
        return _same if function is None else function

    def allow_in_graph(self, function: Any) -> Any:
        """Decorator of functions that the compiler calls as they are."""
        return function

    assume_constant_result = allow_in_graph

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_real_compiler(), name)


class _CompilerFinder(MetaPathFinder):
    """Finds the modules of the real compiler, once one of them is imported in spite of the stand-in."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """None as long as no such module is asked for."""
        if name == _NEEDED or not name.startswith(f"{_COMPILER}."):
            return None
        if not isinstance(sys.modules.get(_COMPILER), _NoCompiler):
            return None
        real = _real_compiler()
        if name in sys.modules:
            return ModuleSpec(name, _Loaded())
        return PathFinder.find_spec(name, real.__path__)


class _Loaded(Loader):
    """Gives a module that has been imported meanwhile."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module as it is."""
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is left to do."""


def leave_out_compiler() -> None:
    """Let a stand-in take the place of torch's compiler, and transformers do without distributed tensors.

    To be called before transformers' models are imported, in processes that serve; without effect where the compiler is
    there already, or not where it is in torch 2.11 to 2.13.
    """
    directory = Path(torch.__file__).parent / "_dynamo"
    if _COMPILER in sys.modules or not directory.is_dir():
        return
    stand_in: Any = _NoCompiler(directory)
    sys.modules[_COMPILER] = torch._dynamo = stand_in
    sys.meta_path.insert(0, _CompilerFinder())
    for module in (import_utils, utils):
        module.is_torch_distributed_available = _never  # type: ignore[attr-defined]


def _real_compiler() -> ModuleType:
    """The compiler, which takes the place of its stand-in."""
    if isinstance(sys.modules.get(_COMPILER), _NoCompiler):
        del sys.modules[_COMPILER]
    real: Any = importlib.import_module(_COMPILER)
    torch._dynamo = real
    return cast(ModuleType, real)


def _same(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _never() -> bool:
    return False
