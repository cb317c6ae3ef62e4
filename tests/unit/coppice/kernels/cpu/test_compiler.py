"""Machine code on disk, and LLVM's modules of compiled functions: freed, and there again for what calls them."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coppice.kernels.cpu import compiler

PACKAGE = """
from coppice.kernels.cpu.compiler import compiled_exactly

@compiled_exactly
def inner(numbers):
    total = 0.0
    for number in numbers:
        total += number * number
    return total

@compiled_exactly
def outer(numbers):
    return 2.0 * inner(numbers)
"""

RUN = """
import sys
import numpy as np
from coppice.kernels.cpu.compiler import COMPILATIONS, LINKED_MODULES
from loops import inner, outer

numbers = np.arange(4.0)
assert inner(numbers) == 14
counts = [COMPILATIONS.num_kept, LINKED_MODULES.release(), LINKED_MODULES.release()]
if "without" in sys.argv:
    LINKED_MODULES._released.clear()
if "outer" in sys.argv:
    assert outer(numbers) == 28
    counts += [COMPILATIONS.num_kept, LINKED_MODULES.release()]
assert inner(numbers) == 14
print(*counts)
"""


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    (tmp_path / "loops").mkdir()
    (tmp_path / "loops" / "__init__.py").write_text(PACKAGE)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", RUN, *arguments]
        root = Path(__file__).parents[5]
        env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONPATH": f"{tmp_path}:{root}"}
        return subprocess.run(command, capture_output=True, text=True, env=env, timeout=120, check=False)

    return run


def test_modules_are_freed_once_and_back_for_what_is_compiled(
    run: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    assert run().stdout.split() == ["1", "1", "0"]
    # Read from disk.
    assert run().stdout.split() == ["0", "1", "0"]
    # `outer` is compiled with `inner`, whose module is back for that and freed afterwards.
    assert run("outer").stdout.split() == ["0", "1", "0", "1", "2"]
    assert run("outer").stdout.split() == ["0", "1", "0", "0", "1"]


def test_numba_refuses_to_link_what_is_not_there(run: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    run()
    ended = run("outer", "without")
    assert ended.returncode
    assert "unfit for linking" in ended.stderr


def test_of_two_that_save_at_once_each_finds_its_own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_cache_directory", lambda _: tmp_path)
    both = [compiler.compiled_exactly(doubled)._cache._cache_file for _ in range(2)]
    # Each waits a while for the other between reading the index and writing it, and then writes it.
    have_read = threading.Barrier(2)

    def slow(read: Callable[[], Any]) -> Callable[[], Any]:
        def read_slowly() -> Any:
            found = read()
            with contextlib.suppress(threading.BrokenBarrierError):
                have_read.wait(0.5)
            return found

        return read_slowly

    for file in both:
        monkeypatch.setattr(file, "_load_index", slow(file._load_index))
    savers = [threading.Thread(target=file.save, args=(name, name)) for file, name in zip(both, "ab", strict=True)]
    for saver in savers:
        saver.start()
    for saver in savers:
        saver.join()
    found = compiler.compiled_exactly(doubled)._cache._cache_file
    assert [found.load(name) for name in "ab"] == ["a", "b"]


def doubled(number: float) -> float:
    return 2 * number
