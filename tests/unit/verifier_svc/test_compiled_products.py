"""Products of an adapter's tables, compiled, against plain ones in double precision."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from verifier_svc.compiled_products import add_low_rank, scores_behind
from verifier_svc.half_tables import floats, halves
from verifier_svc.space_adapter import Transition
from verifier_svc.transition_scores import TransitionScores

F = np.float32


def numbers(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(F)


def test_tables_are_kept_as_the_nearest_bfloat16() -> None:
    table = torch.tensor([[1.0, -0.0, 3.14159, 1e-30], [65280.0, -1.00390625, 2.5e38, -7.0]])
    kept = halves(table.T)
    assert kept.shape == (4, 2)
    assert kept.flags.c_contiguous
    assert (floats(kept) == table.T.bfloat16().float().numpy()).all()


@pytest.mark.parametrize("rows", [[], [3], [0, 2, 4]], ids=len)
def test_low_rank_products_are_added_to_the_rows_that_are_named(rows: list[int]) -> None:
    values, result = numbers(5, 37, seed=1), numbers(5, 50, seed=2)
    down, up = halves(torch.from_numpy(numbers(3, 37, seed=3))), halves(torch.from_numpy(numbers(3, 50, seed=4)))
    before = result.copy()
    add_low_rank(values, np.array(rows, np.int64), down, up, result)
    added = values.astype(np.float64) @ floats(down).T @ floats(up)
    for row in range(5):
        if row in rows:
            assert np.allclose(result[row], before[row] + added[row], atol=1e-5)
        else:
            assert (result[row] == before[row]).all()


def test_scores_behind_tokens_are_those_of_their_depths_in_units_of_their_sigmas() -> None:
    vocab, rank = 61, 5
    scores, before = numbers(3, vocab, seed=1), numbers(vocab, rank, seed=2)
    behind = torch.from_numpy(numbers(vocab, rank, seed=3))
    sigmas = np.array([0.5, 1.0, 2.0], F)
    known = TransitionScores(Transition(torch.from_numpy(before), behind))
    tokens, depths = [7, 60, 0, 7], [2, 0, 0, 1]
    table = behind.bfloat16().double().numpy()
    expected = (scores[depths] + before[tokens].astype(np.float64) @ table.T) / sigmas[depths, None]
    assert np.allclose(known.behind(tokens, scores, depths, sigmas), expected, atol=1e-5)
    assert scores_behind(scores, np.empty(0, np.int64), before[:0], halves(behind.T), sigmas[:0]).shape == (0, vocab)
