"""Threads that wait must neither spin for ever nor sleep at once."""

from __future__ import annotations

import subprocess
import sys

import pytest

from coppice.kernels.cpu.openmp import set_spin_count


def test_a_spin_count_that_is_set_is_kept() -> None:
    env = {"GOMP_SPINCOUNT": "7"}
    set_spin_count(env)
    assert env == {"GOMP_SPINCOUNT": "7"}


# Ends where torch would be imported, which takes seconds.
CHECK = """
import builtins, os, sys
real = builtins.__import__

def checked(name, *args, **kwargs):
    if name == "torch":
        print("spin count", os.environ.get("GOMP_SPINCOUNT"))
        sys.exit()
    return real(name, *args, **kwargs)

builtins.__import__ = checked
sys.argv = ["service"]
import runpy
runpy.run_module("MODULE", run_name="__main__")
"""


@pytest.mark.parametrize("module", ["verifier_svc", "drafter_svc"])
def test_services_set_the_spin_count_before_torch_is_imported(module: str) -> None:
    env = {"MODEL": "nowhere/to/be/found", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", CHECK.replace("MODULE", module)]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.removeprefix("spin count ").strip().isdigit(), result.stdout
