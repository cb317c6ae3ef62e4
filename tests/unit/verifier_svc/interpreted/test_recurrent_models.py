"""Whole models with recurrent layers on the Triton kernels: greedy trees against transformers' generate."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.families.checkpoints import FAMILIES, VOCAB
from tests.fuzz.references import generated
from tests.unit.verifier_svc.greedy_trees import greedy_by_trees
from verifier_svc.kernels.triton.attention import TritonKernel
from verifier_svc.layers import linear_recurrence
from verifier_svc.layers.causal_convolution import CausalConvolution
from verifier_svc.layers.triton_recurrence import TritonRecurrence
from verifier_svc.model.target_model import TargetModel

# transformers warns of what it computes without kernels.
pytestmark = pytest.mark.filterwarnings("ignore")


# The gated delta rule, one with decays by key, Mamba-2, and Mamba-1 without attention.
@pytest.mark.parametrize("name", ["qwen3.5", "kimi-linear", "bamba", "falcon-mamba"])
def test_speculation_changes_no_token(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FAMILIES[name].write(tmp_path)
    model, plain = (AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval() for _ in range(2))
    prompt = np.random.default_rng(2).integers(3, VOCAB, 20).tolist()
    expected, gaps = generated(plain, prompt, 24)
    assert min(gaps) > FAMILIES[name].near_tie_gap
    monkeypatch.setattr(linear_recurrence, "is_compiled_on", lambda _: False)
    target = TargetModel(model, exact=False, num_blocks=8, kernel=TritonKernel(torch.device("cpu"), programs=2))
    assert target.recurrent is not None
    recurrences = [recurrence for layer in target.recurrent.layers for recurrence in layer.recurrences]
    assert {type(recurrence) for recurrence in recurrences} == {CausalConvolution, TritonRecurrence}
    for recurrence in recurrences:
        if isinstance(recurrence, CausalConvolution):
            recurrence._is_compiled = False
    said, num_passes = greedy_by_trees(target, prompt, expected, VOCAB)
    assert said[: len(expected)] == expected
    assert num_passes < len(expected) / 2
