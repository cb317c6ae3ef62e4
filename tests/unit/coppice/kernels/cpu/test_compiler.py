"""LLVM's modules of compiled functions are freed, and there again when others are compiled with them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

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
