"""The compiled pass over a few rows: the model's own logits but for the rounding of its weights to 8 bits."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from numba.core.errors import NumbaError
from transformers import LlamaForCausalLM

from coppice.draft_models.kernels.cpu import llama_pass
from coppice.draft_models.kernels.cpu.int8_weights import quantise
from coppice.draft_models.kernels.cpu.llama_pass import FewRowsPass
from drafter_svc.model import checkpoint, llama_forward
from drafter_svc.model.hf_forward import PlainForward
from drafter_svc.model.llama_forward import MOST_ROWS, LlamaForward
from tests.eight_bits import needs_int8_inputs, round_inputs_to_8_bits, round_to_8_bits
from tests.unit.drafter_svc.test_forward import LLAMAS, make_llama, run_random_rounds


@pytest.mark.parametrize("changes", [v for k, v in LLAMAS.items() if k != "tied"])
def test_logits_are_those_of_the_model_with_weights_of_8_bits(changes: dict[str, object]) -> None:
    model = round_to_8_bits(make_llama(**changes))
    forward = LlamaForward(model, "w8")
    for seed in range(3):
        expected = run_random_rounds(PlainForward(model), seed)
        assert np.abs(run_random_rounds(forward, seed) - expected).max() < 2e-4


@needs_int8_inputs
@pytest.mark.parametrize("changes", [v for k, v in LLAMAS.items() if k != "tied"])
def test_logits_are_those_of_the_model_with_inputs_of_8_bits_too(changes: dict[str, object]) -> None:
    model = round_to_8_bits(make_llama(**changes))
    weights_only = LlamaForward(model, "w8")
    forward = LlamaForward(model, "w8a8")
    round_inputs_to_8_bits(model)
    for seed in range(3):
        logits = run_random_rounds(forward, seed)
        expected = run_random_rounds(PlainForward(model), seed)
        # A value halfway between two steps may go either way, which moves everything behind it a little.
        deviation = np.abs(logits - expected)
        assert np.median(deviation) < 2e-4
        assert deviation.mean() < np.abs(run_random_rounds(weights_only, seed) - expected).mean() / 10


def test_few_rows_are_compiled_and_many_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    run = FewRowsPass.run

    def counted(self: FewRowsPass, kv: np.ndarray, length: int, rows: llama_pass.Rows) -> np.ndarray:
        counts.append(len(rows.token_ids))
        return run(self, kv, length, rows)

    monkeypatch.setattr(FewRowsPass, "run", counted)
    most = MOST_ROWS["w8"]
    for prompt_tokens in (most, most + 1):
        counts.clear()
        run_random_rounds(LlamaForward(make_llama(), "w8"), 0, prompt_tokens)
        assert (counts[0] == most) == (prompt_tokens == most)
        assert max(counts[1:]) < most


def test_a_drafter_gets_the_compiled_pass(llama: LlamaForCausalLM, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert isinstance(checkpoint.choose_forward(llama), LlamaForward)
    assert "compiled draft steps" in caplog.text


@pytest.mark.parametrize("error", [NumbaError("no such type"), RuntimeError("LLVM"), PermissionError("no cache")])
def test_where_compiling_fails_drafts_are_slower_but_there(
    error: Exception, llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(llama_forward, "CompiledLlama", fail)
    forward = checkpoint.choose_forward(llama)
    assert "compiling draft steps failed" in caplog.text
    assert "not compiled" in caplog.text
    expected = run_random_rounds(PlainForward(llama), 0)
    assert np.abs(run_random_rounds(forward, 0) - expected).max() < 2e-4, "full precision"


def test_a_compiled_pass_that_deviates_is_not_used(
    llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(llama_pass, "quantise", lambda weight: quantise(weight)._replace(scales=np.abs(weight).max(-1)))
    forward = checkpoint.choose_forward(llama)
    assert "too much" in caplog.text or "off by" in caplog.text
    expected = run_random_rounds(PlainForward(llama), 0)
    assert np.abs(run_random_rounds(forward, 0) - expected).max() < 2e-4
