"""The transformers baselines on a tiny random model, against the obvious loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from coppice.lab.bench.contenders import Task
from coppice.lab.bench.harness.experiment import BenchmarkError
from coppice.lab.bench.transformers_baseline import TransformersContender, load_model, quiet_transformers, top_two_gap

PROMPT = (5, 17, 200, 31)


@pytest.fixture(autouse=True)
def _quiet() -> None:
    quiet_transformers()


def _greedy(model_dir: Path, num_tokens: int) -> tuple[int, ...]:
    model = load_model(model_dir)
    context = list(PROMPT)
    with torch.inference_mode():
        for _ in range(num_tokens):
            context.append(int(model(input_ids=torch.tensor([context])).logits[0, -1].argmax()))
    return tuple(context[len(PROMPT) :])


@pytest.mark.parametrize("is_assisted", [False, True], ids=["plain", "assisted"])
def test_greedy_output_is_the_argmax_at_every_step_and_passes_eos(tiny_target: Path, is_assisted: bool) -> None:
    assistant = load_model(tiny_target) if is_assisted else None
    contender = TransformersContender("baseline", load_model(tiny_target), assistant)
    completion = contender.complete(Task(PROMPT, 24, 0.0, seed=0))
    assert completion.token_ids == _greedy(tiny_target, 24)
    assert 0 < completion.ttft_s < completion.wall_s
    assert 0 < completion.forward_s < completion.wall_s
    assert sum(item.count for item in completion.passes.values()) == completion.num_rounds
    assert (completion.num_rounds == 24) is not is_assisted


@pytest.mark.parametrize("is_assisted", [False, True], ids=["plain", "assisted"])
def test_sampling_is_a_function_of_the_seed_and_has_the_length_asked_for(tiny_target: Path, is_assisted: bool) -> None:
    assistant = load_model(tiny_target) if is_assisted else None
    contender = TransformersContender("baseline", load_model(tiny_target), assistant)
    first, again, other = (contender.complete(Task(PROMPT, 24, 1.0, seed)).token_ids for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert len(first) == len(other) == 24


def test_the_assistant_keeps_the_librarys_settings_and_the_note_names_them(tiny_target: Path) -> None:
    target = load_model(tiny_target)
    note = TransformersContender("assisted", target, load_model(tiny_target)).note
    assert "num_assistant_tokens=" in note
    assert "num_assistant_tokens_schedule=" in note


def test_the_gap_is_that_of_the_two_best_logits(tiny_target: Path) -> None:
    model = load_model(tiny_target)
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([PROMPT])).logits[0, -1]
    best = logits.argsort(descending=True)[:2].tolist()
    gap, token_ids = top_two_gap(model, PROMPT)
    assert list(token_ids) == best
    assert gap == pytest.approx(float(logits[best[0]] - logits[best[1]]), abs=1e-5)


def test_weights_are_computed_in_float32_whatever_the_checkpoint_holds(tiny_target: Path) -> None:
    assert load_model(tiny_target).dtype is torch.float32


def test_a_directory_without_a_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match=str(tmp_path)):
        load_model(tmp_path)
