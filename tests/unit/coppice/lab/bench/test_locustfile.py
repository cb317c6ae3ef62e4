"""The Locust file, where Locust is installed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[5]


@pytest.mark.skipif(importlib.util.find_spec("locust") is None, reason="the extra `load` is not installed")
def test_locust_finds_the_user() -> None:
    # In a process of its own: Locust changes sockets and threads of the one it is imported into.
    command = [sys.executable, "-m", "locust", "-f", "coppice/lab/bench/locustfile.py", "--list"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert listed.returncode == 0, listed.stderr
    assert "CompletionUser" in listed.stdout
