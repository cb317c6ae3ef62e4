"""Near-ties at the edge of a cut, against every way to round a row of few tokens: all up or down by half the gap."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from coppice.core.noise import gumbel
from coppice.core.sampling import SamplingParams
from verifier_svc.verify.token_choice import TokenChooser

VOCAB = 7
GAP = 0.3
ROUNDINGS = np.array(list(product((-0.4999, 0.4999), repeat=VOCAB)), np.float32) * np.float32(GAP)
ROWS = 250
CUTS = {
    "top_k": SamplingParams(temperature=1.0, top_k=3, seed=1),
    "top_k 1": SamplingParams(temperature=1.0, top_k=1, seed=1),
    "min_p": SamplingParams(temperature=0.7, min_p=0.2, seed=2),
    "min_p 1": SamplingParams(temperature=0.7, min_p=1.0, seed=2),
    "top_p": SamplingParams(temperature=1.5, top_p=0.7, seed=3),
    "tiny top_p": SamplingParams(temperature=1.0, top_p=1e-6, seed=3),
    "all": SamplingParams(temperature=1.3, top_k=5, top_p=0.9, min_p=0.1, seed=4),
    "with a bias": SamplingParams(temperature=1.0, top_k=2, logit_bias={1: 1.0}, bad_token_ids=(4,), seed=5),
}
# Choices that are counted and that no rounding changes: what gets a rival past one cut may keep it behind another.
NOT_CHANGED = {"all": 8}


def row(position: int) -> np.ndarray:
    return np.random.default_rng([7, position]).normal(0, 1.0, VOCAB).astype(np.float32)


@pytest.mark.parametrize("name", CUTS)
def test_near_ties_are_the_choices_that_some_rounding_changes(name: str) -> None:
    params = CUTS[name]
    plain = TokenChooser(params, VOCAB, prompt=[])
    counting = TokenChooser(params, VOCAB, prompt=[], near_tie_gap=GAP)
    num_changed, num_counted, num_within = 0, 0, 0
    for position in range(ROWS):
        logits = row(position)
        chosen = counting.choose(logits, position)
        is_counted = counting.take_near_ties() == 1
        rounded = {plain.choose(one, position) for one in logits + ROUNDINGS}
        is_changed = rounded != {chosen}
        assert is_counted >= is_changed, f"row {position} is changed by rounding and not counted"
        num_changed += is_changed
        num_counted += is_counted
        num_within += is_changed and not two_best_are_close(params, logits, position)
    assert ROWS / 20 < num_changed < ROWS / 2
    assert num_counted - num_changed <= NOT_CHANGED.get(name, 0)
    # The two best scores of what is left do not tell.
    assert num_within > ROWS / 50


def test_at_next_to_no_temperature_near_ties_are_those_of_greedy_decoding() -> None:
    cut = TokenChooser(
        SamplingParams(temperature=1e-6, top_k=3, top_p=0.9, min_p=0.1), VOCAB, prompt=[], near_tie_gap=GAP
    )
    greedy = TokenChooser(SamplingParams(), VOCAB, prompt=[], near_tie_gap=GAP)
    counts = []
    for position in range(ROWS):
        assert cut.choose(row(position), position) == greedy.choose(row(position), position)
        counts.append(greedy.take_near_ties())
        assert cut.take_near_ties() == counts[-1]
    assert ROWS / 20 < sum(counts) < ROWS / 2


def two_best_are_close(params: SamplingParams, logits: np.ndarray, position: int) -> bool:
    """Whether, of the tokens that the cuts leave, the two best scores are within the gap."""
    with np.errstate(divide="ignore"):
        scores = np.log(TokenChooser(params, VOCAB, prompt=[]).law(logits, []))
    second, best = np.sort(scores + gumbel(params.seed, position, 1, VOCAB)[0])[-2:]
    return bool((best - second) * params.temperature < GAP)
