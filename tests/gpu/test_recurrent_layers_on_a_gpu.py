"""Recurrent layers on the device: what the interpreter is tested for, and checkpoints served as a verifier would."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.families.checkpoints import FAMILIES, VOCAB
from tests.fuzz.references import generated
from tests.unit.verifier_svc.greedy_trees import greedy_by_trees
from tests.unit.verifier_svc.layers.test_recurrences import (  # noqa: F401 tests of this module, too
    KEYS,
    VALUES,
    Inputs,
    NewRunner,
    Runner,
    test_a_pass_that_is_repeated_gives_the_same_bits,
    test_a_row_s_bits_are_those_of_its_path_token_by_token,
    test_a_row_s_output_is_that_of_its_path,
    test_a_state_after_accepted_nodes_is_that_of_their_path,
    test_after_a_pruned_pass_states_advance_over_the_rows_that_remained,
    test_the_bits_after_accepted_nodes_are_those_of_their_path_token_by_token,
    test_the_state_at_a_border_is_kept_and_copied,
)
from verifier_svc.config import VerifierConfig
from verifier_svc.model.loading import load_probed_target

# transformers warns of what it computes without kernels.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
triton_recurrence = pytest.importorskip("verifier_svc.layers.triton_recurrence", reason="Triton is not installed")

RECURRENT = ("lfm2", "qwen3.5", "qwen3-next", "kimi-linear", "granite-4", "bamba", "falcon-h1", "mamba-2", "jamba")


@pytest.fixture(params=["convolution in tensors", "delta", "delta by key", "mamba-1", "mamba-2"])
def new_runner(request: pytest.FixtureRequest, device: torch.device) -> NewRunner:
    """Makes a recurrence without states."""
    num_decays = KEYS if request.param == "delta by key" else 1
    num_steps = VALUES if request.param == "mamba-1" else 1
    inputs = Inputs(200, num_decays, num_steps)
    new_recurrence = functools.partial(triton_recurrence.TritonRecurrence, device)
    return lambda: Runner(request.param, inputs, new_recurrence, device.type)


@pytest.mark.parametrize("name", [*RECURRENT, "falcon-mamba"])
def test_speculation_changes_no_token(
    name: str, device: torch.device, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In single precision, against transformers on the CPU, up to the first place where two tokens are about equal."""
    family = FAMILIES[name]
    family.write(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    prompt = np.random.default_rng(2).integers(3, VOCAB, 20).tolist()
    expected, gaps = generated(plain, prompt, 40)
    is_tie = [gap <= family.near_tie_gap for gap in gaps]
    clear = is_tie.index(True) if True in is_tie else len(gaps)
    assert clear > 5
    with caplog.at_level("INFO"):
        config = VerifierConfig(model=str(tmp_path), device=device.type, dtype="float32", kv_cache_mib=8)
        target, info = load_probed_target(config)
    assert "recorded a pass" not in caplog.text
    assert not info.exact
    assert info.near_tie_gap > 0
    said, num_passes = greedy_by_trees(target, prompt, expected, VOCAB)
    assert said[:clear] == expected[:clear]
    assert num_passes < len(expected)


# Random weights that rounding changes little.
@pytest.mark.parametrize(("name", "seed"), [("lfm2", 0), ("qwen3.5", 2), ("bamba", 0), ("mamba-2", 0)])
def test_a_checkpoint_is_served_in_bfloat16(name: str, seed: int, device: torch.device, tmp_path: Path) -> None:
    FAMILIES[name].write(tmp_path, seed)
    config = VerifierConfig(model=str(tmp_path), device=device.type, dtype="bfloat16", kv_cache_mib=8)
    target, info = load_probed_target(config)
    assert info.dtype == "bfloat16"
    assert len(greedy_by_trees(target, [5, 6, 7], [8] * 20, VOCAB)[0]) >= 20
