"""Compilation of inner loops with Numba. The import fails without Numba."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import llvmlite.binding
import numba
from numba.core.event import Event, Listener, register

from coppice.kernels.cpu.amx import MULTIPLIES_TILES

logger = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])
# Sums may be reordered and multiply-adds fused; infinities and NaN are kept.
_FAST_MATH = {"reassoc", "contract", "arcp", "nsz"}


class Compilations(Listener):
    """Counts functions that this process has compiled, which it does not when it finds machine code on disk."""

    def __init__(self) -> None:
        # Those whose machine code is kept on disk.
        self.num_kept = 0

    def on_start(self, event: Event) -> None:
        """A function is about to be compiled."""
        self.num_kept += event.data["dispatcher"].stats.cache_path is not None

    def on_end(self, event: Event) -> None:
        """It is compiled, or not."""


class LinkedModules(Listener):
    """LLVM's modules of compiled functions, which are only needed to compile others that call them.

    A module takes about twelve times as much memory as its bitcode, which is kept instead until something is compiled.
    """

    def __init__(self) -> None:
        self._dispatchers: list[Any] = []
        # Numba's libraries and their bitcode.
        self._released: list[tuple[Any, bytes]] = []
        # Another thread that compiles has to wait until all are there.
        self._lock = threading.Lock()

    def add(self, dispatcher: Any) -> None:
        """Release the modules of this function, too."""
        self._dispatchers.append(dispatcher)

    def release(self) -> int:
        """Free all modules; returns how many. Numba refuses to link a library without one."""
        found = [one.library for dispatcher in self._dispatchers for one in dispatcher.overloads.values()]
        # What Numba links from the module that runs stays.
        apart = [one for one in found if getattr(one, "_shared_module", None) not in (None, one._final_module)]
        for library in apart:
            self._released.append((library, library._shared_module.as_bitcode()))
            library._shared_module = None
        return len(apart)

    def on_start(self, event: Event) -> None:
        """A function is about to be compiled: have all modules again."""
        with self._lock:
            while self._released:
                library, bitcode = self._released.pop()
                library._shared_module = llvmlite.binding.parse_bitcode(bitcode)

    def on_end(self, event: Event) -> None:
        """It is compiled, or not."""


COMPILATIONS, LINKED_MODULES = Compilations(), LinkedModules()
for _listener in (COMPILATIONS, LINKED_MODULES):
    register("numba:compile", _listener)  # type: ignore[no-untyped-call]


def compiled(function: Function) -> Function:
    """Compile on the first call, for speed: sums may be reordered."""
    return _compile(function, _FAST_MATH)


def compiled_exactly(function: Function) -> Function:
    """Compile on the first call, with every operation done and rounded as written."""
    return _compile(function, fast_math=False)


def _compile(function: Function, fast_math: set[str] | bool) -> Function:
    """Compile, caching machine code on disk if possible."""
    directory = _cache_directory(function.__module__.partition(".")[0])
    # Division by zero gives infinity, as in numpy.
    with _caching_in(directory):
        decorator: Any = numba.njit(fastmath=fast_math, error_model="numpy", nogil=True, cache=directory is not None)
        result = decorator(function)
    if directory is not None:
        _save_in_turns(result, directory)
    LINKED_MODULES.add(result)
    return cast(Function, result)


@cache
def _cache_directory(package: str) -> Path | None:
    """Cache directory of machine code for the current sources of a package and of this one, which it may call.

    Numba itself looks at the file of the compiled function alone, and would go on using what was compiled with an
    older version of a function that it calls in another file.
    """
    (source,) = sys.modules[package].__path__
    # Numba knows the processor, but not whether the system lets a process use its tiles.
    digest = hashlib.sha256(b"tiles" if MULTIPLIES_TILES else b"")
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


def _save_in_turns(dispatcher: Any, directory: Path) -> None:
    """Let one process at a time save machine code.

    Numba reads the index of a function's signatures, writes it with the next number, and then the code under that
    number: of two processes that do so at once, one would find the code of the other's signature under its own.
    """
    # Private to Numba: another version may have none.
    file = getattr(dispatcher._cache, "_cache_file", None)
    if file is None:
        return
    save = file.save

    def in_turn(key: Any, data: Any) -> None:
        with (directory / "lock").open("w") as lock:
            # Not every file system has locks.
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
            save(key, data)

    file.save = in_turn


@contextlib.contextmanager
def _caching_in(directory: Path | None) -> Iterator[None]:
    """Make functions decorated meanwhile cache their machine code in `directory`."""
    config: Any = numba.config
    before = config.CACHE_DIR
    config.CACHE_DIR = before if directory is None else str(directory)
    try:
        yield
    finally:
        config.CACHE_DIR = before
