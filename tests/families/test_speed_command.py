"""The command that times a hybrid runs from end to end."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.timeout(900)
def test_the_figures_of_a_hybrid_are_told() -> None:
    command = [sys.executable, "-m", "tests.families.speed", "--dtypes", "float32", "--runs", "1"]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    peak = found["peak_mib"]
    assert peak is None or 0 < peak["tree_above_node"] <= peak["states_of_one_layer"] + peak["stash"]
    assert set(found["pass_ms"]) == {"1", "2", "4", "8", "16", "32"}
    assert min(found["rows16/rows1"], found["tree32/chain32"], found["prefill/transformers"], found["state_kib"]) > 0
