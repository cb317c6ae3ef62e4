"""The distillation recipe: its loss against the whole distributions, its data, its calibration, and a tiny full run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from coppice.training.acceptance_report import measure_acceptance
from coppice.training.state import ForeignStateError
from coppice.training.target_samples import SampleShape, sample_target
from coppice.training.teacher import TOP, TaughtRows, distillation_loss, teach
from drafter_svc.model.checkpoint import load_calibration
from tests.tiny_checkpoint import ONE_LAYER, tiny_llama

VOCAB = 256


@pytest.fixture(autouse=True)
def quiet_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread, and no compiler: tests check results, not speed."""
    torch.set_num_threads(1)
    monkeypatch.setattr("shutil.which", lambda name: None)


def teacher(seed: int) -> LlamaForCausalLM:
    return tiny_llama(
        vocab_size=VOCAB,
        max_context_tokens=64,
        seed=seed,
        initializer_range=0.4,
        tie_word_embeddings=True,
        **ONE_LAYER,
    )


def test_loss_over_the_likeliest_tokens_and_the_rest_is_that_of_the_lumped_distributions() -> None:
    generator = torch.Generator().manual_seed(0)
    teacher = torch.randn(2, 5, VOCAB, generator=generator).mul(2).log_softmax(-1)
    student = torch.randn(2, 5, VOCAB, generator=generator)
    top = teacher.topk(TOP)
    loss = distillation_loss(student, top.indices, top.values, total_variation=0.5)

    def lumped(log_probs: torch.Tensor) -> torch.Tensor:
        chosen = log_probs.exp().gather(-1, top.indices)
        return torch.cat([chosen, 1 - chosen.sum(-1, keepdim=True)], -1)

    p, q = lumped(teacher), lumped(student.log_softmax(-1))
    expected = ((p * (p / q).log()).sum(-1) + 0.5 * 0.5 * (p - q).abs().sum(-1)).mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)


def test_loss_is_zero_for_a_student_that_is_the_teacher() -> None:
    logits = torch.randn(1, 4, VOCAB, generator=torch.Generator().manual_seed(1))
    top = logits.log_softmax(-1).topk(TOP)
    assert distillation_loss(logits, top.indices, top.values, 1.0).item() == pytest.approx(0, abs=1e-5)


def test_taught_rows_hold_the_targets_likeliest_next_tokens(tmp_path: Path) -> None:
    target = teacher(0)
    rows = torch.randint(VOCAB, (3, 12), generator=torch.Generator().manual_seed(2))
    taught = teach(target, rows, tmp_path)
    with torch.inference_mode():
        expected = target(input_ids=rows).logits.log_softmax(-1)
    assert torch.equal(taught.top_ids[..., 0].long(), expected.argmax(-1))
    assert taught.top_ids.shape == (3, 12, TOP)
    assert torch.allclose(taught.top_log_probs.float(), expected.topk(TOP).values, atol=2e-2)
    again = teach(teacher(9), rows, tmp_path)
    assert torch.equal(again.top_ids, taught.top_ids), "chunks on disk are not computed again"


def test_batches_are_a_function_of_the_step() -> None:
    rows = torch.arange(40).reshape(20, 2)
    taught = TaughtRows(rows, rows[..., None].repeat(1, 1, TOP), torch.zeros(20, 2, TOP))
    first, again, other = (taught.batch(4, seed=1, step=step) for step in (7, 7, 8))
    assert torch.equal(first.token_ids, again.token_ids)
    assert not torch.equal(first.token_ids, other.token_ids)
    assert torch.equal(first.top_ids[..., 0], first.token_ids)


def test_samples_continue_corpus_windows_and_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    target = teacher(0)
    corpus = np.random.default_rng(0).integers(0, VOCAB, 500).astype(np.uint16)
    shape = SampleShape(rows=8, batch=2, prompt_tokens=5, new_tokens=7)
    whole = sample_target(target, corpus, shape, seed=3, cache=tmp_path / "whole")
    sample_target(target, corpus, SampleShape(4, 2, 5, 7), seed=3, cache=tmp_path / "parts")
    assert (sample_target(target, corpus, shape, seed=3, cache=tmp_path / "parts") == whole).all()
    windows = np.lib.stride_tricks.sliding_window_view(corpus, 5)
    assert whole.shape == (8, 12)
    assert all((windows == row[:5]).all(-1).any() for row in whole)


def test_a_drafter_that_is_the_target_is_always_right() -> None:
    target = teacher(0)
    rows = {t: torch.randint(VOCAB, (6, 20), generator=torch.Generator().manual_seed(4)) for t in (0.0, 1.0)}
    same = measure_acceptance(target, target, rows, prompt_tokens=4, seed=0)
    other = measure_acceptance(target, teacher(1), rows, prompt_tokens=4, seed=0)
    assert same.within_rank == {0.0: [1.0] * 4, 1.0: [1.0] * 4}
    assert all(same.sigmas[temperature] < other.sigmas[temperature] for temperature in rows)
    assert other.within_rank[1.0][0] < 0.9
    assert other.within_rank[1.0] == sorted(other.within_rank[1.0])


def test_the_recipe_runs_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from coppice.training import acceptance_report
    from coppice.training.corpus import read_corpus
    from coppice.training.tokenizer import train_tokenizer
    from drafter_svc.training import small_lm

    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number in range(100):
        text = f"def function_{number}(value):\n    return value + {number}\n" * 12
        (corpus / f"module_{number}.py").write_text(text)
    monkeypatch.setattr(small_lm, "HIDDEN", 16)
    monkeypatch.setattr(acceptance_report, "EVALUATION_ROWS", 4)
    target = teacher(0)
    train_tokenizer(read_corpus([corpus]), tmp_path / "target", vocab_size=300)
    torch.manual_seed(0)
    config = target.config
    config.vocab_size = 300
    config.max_position_embeddings = 256
    LlamaForCausalLM(config).save_pretrained(tmp_path / "target")
    monkeypatch.setattr(small_lm, "SampleShape", lambda rows: SampleShape(rows, 4, 8, 8))
    recipe = small_lm.SmallLmRecipe(
        steps=4, rows=4, sample_rows=8, corpus_rows=8, fresh_cycles=2, fresh_steps=3, fresh_rows=2
    )
    small_lm.train_small_lm([corpus], tmp_path / "target", tmp_path / "out", recipe)
    drafter = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert drafter.config.vocab_size == 300
    calibration = json.loads((tmp_path / "out" / "drafter.json").read_text())
    assert all(sigma > 0 for sigma in calibration["sigmas"].values())
    # The drafter reads its own recipe's calibration.
    read = load_calibration(str(tmp_path / "out"))
    assert {str(temperature): sigma for temperature, sigma in read.sigmas} == calibration["sigmas"]
    assert len(read.acceptance_by_rank) == 4
    assert read.context == 16
    assert sum(read.acceptance_by_rank) == pytest.approx(calibration["within_rank"]["1.0"][-1])
    # The state of one recipe is not that of another.
    with pytest.raises(ForeignStateError, match="other settings"):
        small_lm.train_small_lm([corpus], tmp_path / "target", tmp_path / "out", replace(recipe, steps=5))
    # Nor is it that of another target or corpus.
    torch.manual_seed(1)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "target")
    (corpus / "module_0.py").write_text("print('something else')\n" * 50)
    with pytest.raises(ForeignStateError, match="another corpus and target "):
        small_lm.train_small_lm([corpus], tmp_path / "target", tmp_path / "out", recipe)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "bits per byte" in card
    assert "k=4" in card
    assert "| steps | 10 |" in card
