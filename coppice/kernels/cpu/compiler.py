"""Compiling innermost loops with Numba. Importing this fails where Numba is not installed."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

logger = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])
# Sums may be reordered and multiplications fused; infinities stay what they are.
_FAST_MATH = {"reassoc", "contract", "arcp", "nsz"}


def compiled(function: Function) -> Function:
    """Compile a function at its first call, for speed: sums may be taken in any order."""
    return _compile(function, _FAST_MATH)


def compiled_exactly(function: Function) -> Function:
    """Compile a function at its first call, such that every operation is done and rounded as it is written."""
    return _compile(function, fast_math=False)


def _compile(function: Function, fast_math: set[str] | bool) -> Function:
    """The machine code is kept on disk where there is a place for it."""
    directory = _cache_directory(function.__module__.partition(".")[0])
    # Divisions by zero give infinities, as in numpy.
    with _caching_in(directory):
        decorator: Any = numba.njit(fastmath=fast_math, error_model="numpy", nogil=True, cache=directory is not None)
        result = decorator(function)
    return cast(Function, result)


@cache
def _cache_directory(package: str) -> Path | None:
    """Where machine code of this package's present sources, which may call this file's package, is kept.

    Numba itself looks at the file of the compiled function alone, and would go on using what was compiled with an
    older version of a function that it calls in another file.
    """
    (source,) = sys.modules[package].__path__
    digest = hashlib.sha256()
    for folder in dict.fromkeys([Path(__file__).parent, Path(source)]):
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.read_bytes())
    for parent in (Path(source) / "__pycache__", Path.home() / ".cache" / "coppice"):
        directory = parent / "numba" / package / digest.hexdigest()[:16]
        try:
            directory.mkdir(parents=True, exist_ok=True)
            (directory / "writable").touch()
        except OSError as error:
            logger.info("compiled code is not kept in %s: %s", directory, error)
        else:
            return directory
    return None


@contextlib.contextmanager
def _caching_in(directory: Path | None) -> Iterator[None]:
    """Have what is decorated meanwhile keep its machine code in `directory`."""
    config: Any = numba.config
    before = config.CACHE_DIR
    config.CACHE_DIR = before if directory is None else str(directory)
    try:
        yield
    finally:
        config.CACHE_DIR = before
