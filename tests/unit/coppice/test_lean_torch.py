"""Processes that serve do without torch's compiler, which is there for whatever asks for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_checkpoint import write_tiny_llama

LOADED = """
import sys
from coppice.lean_torch import leave_out_compiler
leave_out_compiler()
import torch
from {module} import {function}
{call}
heavy = [name for name in ("torch._inductor", "torch.distributed.tensor", "torch._dynamo.eval_frame")
    if name in sys.modules]
assert not heavy, heavy
{needs}
assert "torch._dynamo.eval_frame" in sys.modules
print(torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item())
"""
VERIFIER = {
    "module": "verifier_svc.model.loading",
    "function": "load_probed_target",
    "call": "from verifier_svc.config import VerifierConfig\n"
    "load_probed_target(VerifierConfig(model=sys.argv[1], device='cpu'))",
}
DRAFTER = {
    "module": "drafter_svc.model.checkpoint",
    "function": "load_model",
    "call": "load_model(sys.argv[1], torch.device('cpu'))(torch.tensor([[1, 2, 3]]))",
}
NEEDS = ("from torch._dynamo import config", "torch.compile(print)")


@pytest.mark.parametrize("service", [VERIFIER, DRAFTER], ids=["verifier", "drafter"])
def test_a_model_is_loaded_and_run_without_the_compiler(service: dict[str, str], tmp_path: Path) -> None:
    write_tiny_llama(tmp_path, vocab_size=64, max_context_tokens=128)
    command = [sys.executable, "-c", LOADED.format(**service, needs="torch._dynamo.reset()"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["2.0"]), done.stderr


@pytest.mark.parametrize("needs", NEEDS)
def test_the_compiler_is_there_for_what_needs_it(needs: str) -> None:
    nothing = {"module": "transformers", "function": "masking_utils", "call": ""}
    command = [sys.executable, "-c", LOADED.format(**nothing, needs=needs)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["2.0"]), done.stderr
