"""Choosing tokens: processors against transformers' own, noise against the softmax."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from coppice.core.noise import gumbel
from coppice.core.sampling import SamplingParams
from verifier_svc.verify.token_choice import TokenChooser

VOCAB = 101


def row(seed: int) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(VOCAB) * 3).astype(np.float32)


@pytest.mark.parametrize(
    ("params", "warper"),
    [
        (SamplingParams(temperature=0.7, seed=3), None),
        (SamplingParams(temperature=1.0, seed=3), None),
        (SamplingParams(temperature=0.7, top_k=5, seed=3), TopKLogitsWarper(5)),
        (SamplingParams(temperature=0.7, top_p=0.6, seed=3), TopPLogitsWarper(0.6)),
        (SamplingParams(temperature=0.7, min_p=0.2, seed=3), MinPLogitsWarper(0.2)),
    ],
    ids=["plain", "T=1", "top_k", "top_p", "min_p"],
)
def test_truncation_is_that_of_transformers(params: SamplingParams, warper: object) -> None:
    processors = LogitsProcessorList([TemperatureLogitsWarper(params.temperature), *([warper] if warper else [])])
    chooser = TokenChooser(params, VOCAB, prompt=[])
    for position in range(200):
        logits = row(position)
        expected = processors(None, torch.from_numpy(logits)[None].double())[0].numpy()
        noisy = expected + gumbel(3, position, 1, VOCAB)[0]
        assert chooser.choose(logits, position) == int(noisy.argmax())


def test_draws_follow_the_softmax() -> None:
    logits = row(0)
    probabilities = np.exp(logits - logits.max(), dtype=np.float64)
    probabilities /= probabilities.sum()
    chooser = TokenChooser(SamplingParams(temperature=1.0, seed=11), VOCAB, prompt=[])
    draws = 20_000
    counts = np.bincount([chooser.choose(logits, position) for position in range(draws)], minlength=VOCAB)
    likely = probabilities * draws >= 5
    chi_square = (((counts - probabilities * draws) ** 2) / (probabilities * draws))[likely].sum()
    # 99.9th percentile of chi-square with `likely.sum()` degrees of freedom, Wilson-Hilferty.
    degrees = likely.sum()
    limit = degrees * (1 - 2 / (9 * degrees) + 3.09 * np.sqrt(2 / (9 * degrees))) ** 3
    assert chi_square < limit


def test_repetition_penalty_is_that_of_transformers() -> None:
    prompt, output = [3, 5, 8], [13, 21]
    chooser = TokenChooser(SamplingParams(repetition_penalty=1.7), VOCAB, prompt=prompt, output=output)
    processor = RepetitionPenaltyLogitsProcessor(1.7)
    for seed in range(100):
        logits = row(seed)
        expected = processor(torch.tensor([[*prompt, *output]]), torch.from_numpy(logits)[None].clone())[0]
        assert chooser.choose(logits, 0) == int(expected.argmax())


def test_presence_and_frequency_penalties_count_the_output_only() -> None:
    logits = np.zeros(VOCAB, np.float32)
    logits[[7, 9]] = 1.0
    chooser = TokenChooser(SamplingParams(presence_penalty=0.3, frequency_penalty=0.4), VOCAB, prompt=[7, 7, 7])
    assert chooser.choose(logits, 0) == 7
    chooser.push(7)
    assert chooser.choose(logits, 1) == 9
    chooser.push(9)
    assert chooser.choose(logits, 2) == 7
    chooser.push(7)
    assert chooser.choose(logits, 3) == 9


def test_bias_allowed_and_bad_tokens() -> None:
    logits = row(4)
    best = int(logits.argmax())
    assert TokenChooser(SamplingParams(bad_token_ids=(best,)), VOCAB, prompt=[]).choose(logits, 0) != best
    assert TokenChooser(SamplingParams(allowed_token_ids=(17,)), VOCAB, prompt=[]).choose(logits, 0) == 17
    assert TokenChooser(SamplingParams(logit_bias={23: 100.0}), VOCAB, prompt=[]).choose(logits, 0) == 23


def test_end_tokens_wait_for_min_tokens() -> None:
    logits = np.zeros(VOCAB, np.float32)
    logits[2] = 9.0
    chooser = TokenChooser(SamplingParams(), VOCAB, prompt=[], end_token_ids=[2], min_tokens=2)
    drawn = []
    for position in range(3):
        drawn.append(chooser.choose(logits, position))
        chooser.push(drawn[-1])
    assert drawn == [0, 0, 2]


def test_the_choice_depends_on_seed_and_position_alone() -> None:
    params = SamplingParams(temperature=1.0, seed=5)
    forwards = [TokenChooser(params, VOCAB, prompt=[]).choose(row(1), position) for position in range(40)]
    one = TokenChooser(params, VOCAB, prompt=[1, 2, 3], output=[4, 5])
    backwards = [one.choose(row(1), position) for position in reversed(range(40))]
    assert forwards == backwards[::-1]
    other = TokenChooser(SamplingParams(temperature=1.0, seed=6), VOCAB, prompt=[])
    assert forwards != [other.choose(row(1), position) for position in range(40)]


NEAR_TIE_GAP = 0.3
COUNTED = {
    "greedy": SamplingParams(),
    "T=0.5": SamplingParams(temperature=0.5, seed=3),
    "T=2": SamplingParams(temperature=2.0, seed=3),
    "penalties": SamplingParams(repetition_penalty=1.5, frequency_penalty=0.5),
}


@pytest.mark.parametrize("name", COUNTED)
def test_near_ties_are_choices_whose_two_best_scores_are_close(name: str) -> None:
    params = COUNTED[name]
    counting = TokenChooser(params, VOCAB, prompt=[5], output=[8, 8], near_tie_gap=NEAR_TIE_GAP)
    plain = TokenChooser(params, VOCAB, prompt=[5], output=[8, 8])
    expected = 0
    for position in range(200):
        logits = row(position)
        assert counting.choose(logits, position) == plain.choose(logits, position)
        scores = logits.astype(np.float64)
        if params.has_penalties:
            scores[[5, 8]] = np.where(scores[[5, 8]] > 0, scores[[5, 8]] / 1.5, scores[[5, 8]] * 1.5)
            scores[8] -= 2 * 0.5
        if params.temperature:
            scores = scores + params.temperature * gumbel(3, position, 1, VOCAB)[0]
        second, best = np.sort(scores)[-2:]
        expected += best - second < NEAR_TIE_GAP
    assert 5 < expected < 100
    assert counting.take_near_ties() == expected
    assert counting.take_near_ties() == plain.take_near_ties() == 0


@pytest.mark.parametrize("temperature", [0.0, 0.6])
def test_rounding_changes_choices_at_near_ties_alone(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=3)
    generator = np.random.default_rng(0)
    num_changed = 0
    for position in range(2000):
        logits = row(position)
        moved = logits + generator.uniform(-0.49, 0.49, VOCAB).astype(np.float32) * NEAR_TIE_GAP
        chooser = TokenChooser(params, VOCAB, prompt=[], near_tie_gap=NEAR_TIE_GAP)
        if chooser.choose(logits, position) != TokenChooser(params, VOCAB, prompt=[]).choose(moved, position):
            assert chooser.take_near_ties() == 1
            num_changed += 1
    assert num_changed > 50


def test_the_only_token_that_is_left_is_no_near_tie() -> None:
    for params in (
        SamplingParams(allowed_token_ids=(17,)),
        SamplingParams(temperature=1.0, allowed_token_ids=(17,)),
        SamplingParams(temperature=1.0, allowed_token_ids=(17,), top_k=1, top_p=0.5, min_p=1.0),
    ):
        chooser = TokenChooser(params, VOCAB, prompt=[], near_tie_gap=NEAR_TIE_GAP)
        assert chooser.choose(row(0), 0) == 17
        assert chooser.take_near_ties() == 0


def test_the_law_is_that_of_the_choice_behind_a_path_and_leaves_the_history_alone() -> None:
    params = SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.3, presence_penalty=0.7, seed=4)
    asked = TokenChooser(params, VOCAB, prompt=[1, 2], output=[3])
    law = asked.law(row(5), [6, 3])
    told = TokenChooser(params, VOCAB, prompt=[1, 2], output=[3, 6, 3])
    draws = 4000
    counts = np.bincount([told.choose(row(5), position) for position in range(draws)], minlength=VOCAB)
    assert not counts[law == 0].any()
    likely = law * draws >= 5
    # The 0.9999 quantile of chi-square stays below twice its degrees of freedom and thirty.
    statistic = ((counts - draws * law)[likely] ** 2 / (draws * law[likely])).sum()
    assert statistic < 2 * likely.sum() + 30
    assert asked.choose(row(5), 9) == TokenChooser(params, VOCAB, prompt=[1, 2], output=[3]).choose(row(5), 9)


def test_where_every_token_is_forbidden_the_law_is_what_the_choice_says() -> None:
    params = SamplingParams(temperature=1.0, allowed_token_ids=(5,), bad_token_ids=(5,))
    chooser = TokenChooser(params, VOCAB, prompt=[])
    assert int(chooser.law(row(1), []).argmax()) == chooser.choose(row(1), 0) == 0
    assert chooser.law(row(1), []).max() == 1
