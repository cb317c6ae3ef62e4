"""The compiled pass over a few rows: the model's own logits but for the rounding of its weights to 8 bits."""

from __future__ import annotations

import logging
import sys

import numpy as np
import pytest
from transformers import LlamaForCausalLM

from drafter_svc.drafters import checkpoint, few_rows
from drafter_svc.drafters.few_rows import FewRowsPass, exponentials, multiply, quantise
from drafter_svc.drafters.hf_forward import PlainForward
from drafter_svc.drafters.llama_forward import FEW_ROWS, LlamaForward
from tests.eight_bits import round_to_8_bits
from tests.unit.drafter_svc.test_forward import LLAMAS, make_llama, run_random_rounds


@pytest.mark.parametrize("changes", [v for k, v in LLAMAS.items() if k != "tied"])
def test_logits_are_those_of_the_model_with_weights_of_8_bits(changes: dict[str, object]) -> None:
    model = round_to_8_bits(make_llama(**changes))
    forward = LlamaForward(model, compile_few_rows=True)
    for seed in range(3):
        expected = run_random_rounds(PlainForward(model), seed)
        assert np.abs(run_random_rounds(forward, seed) - expected).max() < 2e-4


def test_few_rows_are_compiled_and_many_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    run = FewRowsPass.run

    def counted(self: FewRowsPass, kv: np.ndarray, length: int, rows: few_rows.Rows) -> np.ndarray:
        counts.append(len(rows.token_ids))
        return run(self, kv, length, rows)

    monkeypatch.setattr(FewRowsPass, "run", counted)
    run_random_rounds(LlamaForward(make_llama(), compile_few_rows=True), seed=0)
    assert counts
    assert max(counts) <= FEW_ROWS < 9, "the prompt of 9 tokens is not among them"


@pytest.mark.parametrize("rows", range(1, FEW_ROWS + 1))
@pytest.mark.parametrize("shape", [(1, 1), (7, 5), (40, 33)], ids=str)
def test_every_number_of_rows_and_outputs_multiplies_right(shape: tuple[int, int], rows: int) -> None:
    rng = np.random.default_rng(rows)
    weights = quantise(rng.standard_normal(shape).astype(np.float32))
    inputs = rng.standard_normal((rows, shape[1])).astype(np.float32)
    results = np.full((rows, shape[0]), np.nan, np.float32)
    multiply(inputs, weights.values, weights.scales, results)
    expected = inputs.astype(np.float64) @ (weights.values * weights.scales[:, None].astype(np.float64)).T
    assert np.allclose(results, expected, atol=1e-5)


def test_exponentials_are_right_to_six_digits() -> None:
    values = np.linspace(-86, 88, 20_001, dtype=np.float32)
    results = values.copy()
    exponentials(results)
    assert np.allclose(results, np.exp(values.astype(np.float64)), rtol=1e-6)
    hidden = np.array([-np.inf, -1e30], np.float32)
    exponentials(hidden)
    assert (hidden < 1e-37).all()


def test_quantised_weights_are_within_half_a_step_and_zero_rows_stay_zero() -> None:
    weight = np.random.default_rng(0).standard_normal((6, 50)).astype(np.float32)
    weight[2] = 0
    values, scales = quantise(weight)
    assert (np.abs(values * scales[:, None] - weight) <= scales[:, None] * 0.5001).all()
    assert not values[2].any()
    assert values.min() >= -127


def test_a_drafter_gets_the_compiled_pass(llama: LlamaForCausalLM, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert isinstance(checkpoint.choose_forward(llama), LlamaForward)
    assert "compiled draft steps" in caplog.text


def test_without_numba_drafts_are_slower_but_there(
    llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for module in ("drafter_svc.drafters.compiled_search", "drafter_svc.drafters.few_rows", "coppice.compiler"):
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "numba", None)
    forward = checkpoint.choose_forward(llama)
    assert "not compiled" in caplog.text
    expected = run_random_rounds(PlainForward(llama), 0)
    assert np.abs(run_random_rounds(forward, 0) - expected).max() < 2e-4, "full precision"


def test_a_compiled_pass_that_deviates_is_not_used(
    llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(few_rows, "quantise", lambda weight: quantise(weight)._replace(scales=np.abs(weight).max(-1)))
    forward = checkpoint.choose_forward(llama)
    assert "too much" in caplog.text or "off by" in caplog.text
    expected = run_random_rounds(PlainForward(llama), 0)
    assert np.abs(run_random_rounds(forward, 0) - expected).max() < 2e-4
