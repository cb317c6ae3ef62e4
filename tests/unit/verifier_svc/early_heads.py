"""Random early heads for tiny targets, which prune a lot."""

from __future__ import annotations

import torch

from verifier_svc.extras.pruning.head import EarlyHead
from verifier_svc.extras.redraft.adapter import LowRank
from verifier_svc.verify.draw_rule import Threshold, Thresholds

# Early scores of tiny targets are spread around 0.
THRESHOLDS: Thresholds = (Threshold(0.0, 0.0, 0.99), Threshold(0.7, 0.5, 0.99), Threshold(1.0, 1.0, 0.99))


def random_head(hidden_size: int, layer: int = 1, rank: int = 4, thresholds: Thresholds = THRESHOLDS) -> EarlyHead:
    """A head that knows nothing."""
    generator = torch.Generator().manual_seed(1)
    down = torch.randn(rank, hidden_size, generator=generator)
    low_rank = LowRank(down, torch.randn(hidden_size, rank, generator=generator))
    norm = 1 + 0.1 * torch.randn(hidden_size, generator=generator)
    return EarlyHead(layer, norm, torch.zeros(hidden_size), False, 1e-6, low_rank, thresholds)
