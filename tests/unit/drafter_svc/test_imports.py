"""What is loaded before a drafter has set its niceness: nothing that starts threads, which would not have it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

LOADED = """
import sys
import drafter_svc.__main__
print(*sorted({"numba", "numpy", "torch", "transformers"} & set(sys.modules)))
"""


def test_libraries_with_threads_are_loaded_with_the_drafter() -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", LOADED], check=True, cwd=ROOT, env=env, timeout=60, capture_output=True, text=True
    )
    assert done.stdout.split() == []
