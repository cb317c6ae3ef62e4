"""Whole models with recurrent layers on the Triton kernels: greedy trees against transformers' generate."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from triton.errors import TritonError

from coppice.core.errors import IncompatibleError
from tests.families.checkpoints import FAMILIES, VOCAB
from tests.fuzz.references import generated
from tests.unit.verifier_svc.greedy_trees import greedy_by_trees
from tests.unit.verifier_svc.layers.forests import segment
from verifier_svc.config import VerifierConfig
from verifier_svc.kernels.triton.attention import TritonKernel
from verifier_svc.layers import linear_recurrence, triton_recurrence
from verifier_svc.layers.causal_convolution import CausalConvolution
from verifier_svc.layers.recurrence import RowForest
from verifier_svc.layers.triton_recurrence import TritonRecurrence
from verifier_svc.model import loading
from verifier_svc.model.conformance_probe import ConformanceProbe
from verifier_svc.model.target_model import TargetModel

# transformers warns of what it computes without kernels.
pytestmark = pytest.mark.filterwarnings("ignore")


def run_in_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let recurrent layers on a CPU run as on a GPU."""
    initialise = CausalConvolution.__init__

    def in_tensors(convolution: CausalConvolution, weight: Tensor, bias: Tensor | None) -> None:
        initialise(convolution, weight, bias)
        convolution._is_compiled = False

    monkeypatch.setattr(CausalConvolution, "__init__", in_tensors)
    monkeypatch.setattr(linear_recurrence, "is_compiled_on", lambda _: False)


# The gated delta rule, one with decays by key, Mamba-2, and Mamba-1 without attention.
@pytest.mark.parametrize("name", ["qwen3.5", "kimi-linear", "bamba", "falcon-mamba"])
def test_speculation_changes_no_token(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FAMILIES[name].write(tmp_path)
    model, plain = (AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval() for _ in range(2))
    prompt = np.random.default_rng(2).integers(3, VOCAB, 20).tolist()
    expected, gaps = generated(plain, prompt, 24)
    assert min(gaps) > FAMILIES[name].near_tie_gap
    run_in_triton(monkeypatch)
    target = TargetModel(model, exact=False, num_blocks=8, kernel=TritonKernel(torch.device("cpu"), programs=2))
    assert target.recurrent is not None
    recurrences = [recurrence for layer in target.recurrent.layers for recurrence in layer.recurrences]
    assert {type(recurrence) for recurrence in recurrences} == {CausalConvolution, TritonRecurrence}
    said, num_passes = greedy_by_trees(target, prompt, expected, VOCAB)
    assert said[: len(expected)] == expected
    assert num_passes < len(expected) / 2


def test_a_target_is_loaded_as_on_a_gpu_without_recordings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FAMILIES["qwen3.5"].write(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    run_in_triton(monkeypatch)
    monkeypatch.setattr(loading, "compiled_kernel", lambda _: None)
    monkeypatch.setattr(loading, "triton_kernel", lambda _: TritonKernel(torch.device("cpu"), programs=2))
    # Recording would need a GPU, and fail here.
    target = loading.probed(model, ConformanceProbe(model, VOCAB), exact=False, threads=None)
    assert isinstance(target._attention.kernel, TritonKernel)
    config = VerifierConfig(model=str(tmp_path), max_sequences=3, kv_cache_mib=4)
    loading.size_cache(target, config, 420)
    target.record_now()
    states = [layer._recurrence._states for layer in target.recurrent.layers]  # type: ignore[union-attr, attr-defined]
    assert [len(state) for state in states] == [3 + loading._LEAST_KEPT] * 2


def test_a_kernel_that_does_not_compile_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def __getitem__(self, grid: object) -> object:
            def launch(*_: object, **_named: object) -> None:
                raise TritonError("out of registers")

            return launch

    monkeypatch.setattr(triton_recurrence, "advance_walks", Broken())
    recurrence = TritonRecurrence(torch.device("cpu"), 1, 16, 16, corrects=False)
    recurrence.allocate(1)
    recurrence.begin(RowForest([segment(0, 1)]))
    with pytest.raises(IncompatibleError, match="do not run in Triton on this device: out of registers"):
        recurrence(*(torch.zeros(1, 1, size) for size in (16, 16, 16, 1, 1)))
