"""What a token says of the next one: tables in bfloat16, and products with them against plain ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from coppice.kernels.cpu.half_products import scores_behind
from coppice.kernels.cpu.half_tables import floats, halves
from coppice.search.transition_scores import TransitionScores

F = np.float32
# Embeddings of 31 tokens before and behind, and matrices of rank 3 that act on them.
SHAPES = ((31, 6), (31, 8), (3, 6), (3, 8))


def numbers(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(F)


def test_tables_are_kept_as_the_nearest_bfloat16() -> None:
    some = [1.0, -0.0, 3.14159, 1e-30, 65280.0, -1.00390625, 1.01171875, 2.5e38, -7.0, 1e-41]
    table = np.concatenate([np.array(some, F), numbers(990, seed=0)]).reshape(20, 50)
    kept = halves(table.T)
    assert kept.shape == (50, 20)
    assert kept.flags.c_contiguous
    assert (floats(kept) == torch.from_numpy(table).T.bfloat16().float().numpy()).all()


def known_scores() -> tuple[np.ndarray, np.ndarray]:
    """What is said of some tokens, and what should be."""
    vocab, rank = 61, 5
    scores, before, behind = numbers(3, vocab, seed=1), numbers(vocab, rank, seed=2), numbers(vocab, rank, seed=3)
    sigmas = np.array([0.5, 1.0, 2.0], F)
    tokens, depths = [7, 60, 0, 7], [2, 0, 0, 1]
    expected = scores[depths] + before[tokens].astype(np.float64) @ floats(halves(behind)).T
    said = TransitionScores(before, behind).behind(tokens, scores, depths, sigmas)
    return said, expected / sigmas[depths, None]


def test_scores_behind_tokens_are_those_of_their_depths_in_units_of_their_sigmas() -> None:
    said, expected = known_scores()
    assert said.dtype == F
    assert np.allclose(said, expected, atol=1e-5)
    none = np.empty((0, 5), F)
    table = halves(numbers(5, 61, seed=3))
    assert scores_behind(numbers(3, 61, seed=1), np.empty(0, np.int64), none, table, none[:, 0]).shape == (0, 61)


def test_tables_of_embeddings_are_those_of_rows_made_equally_large() -> None:
    embeddings, output, before, behind = (numbers(*shape, seed=seed) for seed, shape in enumerate(SHAPES))
    scores = numbers(1, 31, seed=4)
    known = TransitionScores.of_embeddings(before, behind, 7 * embeddings, output)
    said = known.behind([30, 0], scores, [0, 0], np.ones(1, F))
    for row, token in zip(said, (30, 0), strict=True):
        own = torch.from_numpy(embeddings[token])
        even = own / own.square().mean().sqrt()
        others = torch.from_numpy(output) / torch.from_numpy(output).square().mean(-1, keepdim=True).sqrt()
        pair = torch.nn.functional.silu(torch.from_numpy(before) @ even) @ torch.from_numpy(behind) @ others.T
        expected = scores[0] + pair.numpy()
        assert np.abs(row - expected).max() < 0.02 * np.abs(expected).max()
    for wrong in ((before, behind[:2]), (behind, before), (before[:, :3], behind)):
        with pytest.raises(ValueError, match="do not fit embeddings of"):
            TransitionScores.of_embeddings(*wrong, embeddings, output)
