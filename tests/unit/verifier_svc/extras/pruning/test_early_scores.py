"""Early scores: products of the head's rows with the output layer, for the candidates alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from verifier_svc.extras.pruning.head import EarlyHead
from verifier_svc.extras.pruning.layers import early_scores
from verifier_svc.extras.pruning.rows import Candidates
from verifier_svc.extras.redraft.adapter import LowRank
from verifier_svc.model.output_layer import OutputLayer
from verifier_svc.verify.draw_rule import Threshold

HIDDEN, VOCAB, ROWS = 48, 70, 20


def parts(
    *, is_centred: bool, has_addition: bool, has_bias: bool, softcap: float | None
) -> tuple[EarlyHead, OutputLayer]:
    generator = torch.Generator().manual_seed(4)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    low_rank = LowRank(numbers(8, HIDDEN), numbers(HIDDEN, 8)) if has_addition else None
    bias = numbers(HIDDEN) if is_centred else torch.zeros(HIDDEN)
    head = EarlyHead(1, numbers(HIDDEN), bias, is_centred, 1e-5, low_rank, (Threshold(0.0, -5.0, 0.99),))
    return head, OutputLayer(numbers(VOCAB, HIDDEN), numbers(VOCAB) if has_bias else None, 0.5, softcap)


def some_candidates(count: int) -> Candidates:
    generator = np.random.default_rng(8)
    parents = generator.integers(0, ROWS, count)
    return Candidates(np.arange(count), parents, generator.integers(0, VOCAB, count), np.zeros(count))


@pytest.mark.parametrize("count", [0, 1, 55])
@pytest.mark.parametrize("is_centred", [False, True], ids=["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("has_addition", [False, True], ids=["norm alone", "low rank"])
@pytest.mark.parametrize(("has_bias", "softcap"), [(False, None), (True, 3.0)], ids=["plain", "bias and cap"])
def test_scores_are_products_of_predicted_rows_with_the_output_layer(
    is_centred: bool,
    has_addition: bool,
    has_bias: bool,
    softcap: float | None,
    count: int,
) -> None:
    head, output = parts(is_centred=is_centred, has_addition=has_addition, has_bias=has_bias, softcap=softcap)
    hidden = 3 * torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(1)) + 0.5
    candidates = some_candidates(count)
    whole = output.all_scores(head.predict(hidden))
    expected = whole[torch.from_numpy(candidates.parent_rows), torch.from_numpy(candidates.token_ids)]
    torch.testing.assert_close(early_scores(head, output, hidden, candidates), expected, rtol=1e-4, atol=1e-4)
