"""Log-probabilities of committed tokens, against sums that are exact and against torch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from coppice.core.log_probs import TokenLogProbs
from coppice.core.tree import EMPTY_TREE, TokenTree, chain
from verifier_svc.verify.acceptance import sample_and_follow
from verifier_svc.verify.log_probs import committed_log_probs, token_log_probs
from verifier_svc.verify.sampler import Logits

VOCAB = 211


def rows_of(num_rows: int, scale: float = 5.0, vocab_size: int = VOCAB) -> Logits:
    """Random rows of logits [num_rows, vocab]."""
    generator = np.random.default_rng(num_rows)
    return generator.normal(0, scale, (num_rows, vocab_size)).astype(np.float32)


def by_exact_sum(row: Logits, token: int) -> float:
    """The slow, obvious version: an exact sum of exponentials in double precision."""
    return float(row[token]) - math.log(math.fsum(math.exp(logit) for logit in row.tolist()))


@pytest.mark.parametrize("scale", [0.1, 5.0, 50.0])
def test_it_is_the_log_softmax_of_the_raw_logits(scale: float) -> None:
    row = rows_of(1, scale)[0]
    softmax = torch.from_numpy(row).double().log_softmax(0)
    for token in range(0, VOCAB, 17):
        log_prob = token_log_probs(row, token, 0).log_prob
        assert log_prob == pytest.approx(by_exact_sum(row, token), abs=1e-12)
        assert log_prob == pytest.approx(float(softmax[token]), abs=1e-12)


def test_logits_too_large_for_an_exponential_are_no_trouble() -> None:
    assert token_log_probs(np.array([3e4, 3e4, -3e4], np.float32), 0, 0).log_prob == pytest.approx(math.log(0.5))


def test_the_likeliest_come_first_and_of_equal_ones_the_lower_id() -> None:
    row = np.array([1, 3, 2, 3, 2, 2, 0], np.float32)
    assert [token_log_probs(row, 0, n).top_token_ids for n in range(5)] == [(), (1,), (1, 3), (1, 3, 2), (1, 3, 2, 4)]
    everything = token_log_probs(row, 0, 20)
    assert everything.top_token_ids == (1, 3, 2, 4, 5, 0, 6)
    assert everything.top_log_probs == tuple(token_log_probs(row, token, 0).log_prob for token in (1, 3, 2, 4, 5, 0, 6))
    assert everything.log_prob == everything.top_log_probs[5]
    assert math.fsum(math.exp(log_prob) for log_prob in everything.top_log_probs) == pytest.approx(1)


@pytest.mark.parametrize("num_top", [1, 5, 20])
def test_the_likeliest_are_those_of_a_full_sort(num_top: int) -> None:
    for row in rows_of(20):
        assert token_log_probs(row, 0, num_top).top_token_ids == tuple(np.argsort(-row)[:num_top].tolist())


def test_a_row_s_are_the_same_bits_in_every_tree() -> None:
    rows = rows_of(9)
    alone = [token_log_probs(row.copy(), 3, 4) for row in rows]
    assert [token_log_probs(rows[index], 3, 4) for index in range(9)] == alone
    for first in range(1, 9):
        assert [token_log_probs(row, 3, 4) for row in np.ascontiguousarray(rows[first:])] == alone[first:]


def committed(tree: TokenTree, said: list[int], ends_after: int | None = None) -> tuple[TokenLogProbs, ...]:
    """Those of a round in which the target says `said`, cut where its output ends."""
    taken: list[int] = []

    def is_last(token: int) -> bool:
        taken.append(token)
        return len(taken) == ends_after

    accepted = sample_and_follow(tree, lambda node, depth: said[depth], is_last)
    return committed_log_probs(rows_of(1 + len(tree)), accepted, 2)


def test_every_token_has_those_of_the_row_that_it_was_drawn_from() -> None:
    tree = TokenTree((8, 5, 6, 7, 9), (-1, -1, 1, 0, 2), (0.0,) * 5)
    rows = rows_of(6)
    # Accepts nodes 1 and 2, then says something else: drawn behind the root, node 1 and node 2.
    assert committed(tree, [5, 6, 4]) == tuple(
        token_log_probs(rows[row], token, 2) for row, token in ((0, 5), (2, 6), (3, 4))
    )
    assert committed(tree, [3]) == (token_log_probs(rows[0], 3, 2),)
    assert committed(EMPTY_TREE, [3]) == (token_log_probs(rows_of(1)[0], 3, 2),)


def test_an_output_that_ends_on_an_accepted_node_has_no_row_behind_it() -> None:
    rows = rows_of(4)
    assert committed(chain([5, 6, 7]), [5, 6, 7, 1], ends_after=2) == (
        token_log_probs(rows[0], 5, 2),
        token_log_probs(rows[1], 6, 2),
    )
