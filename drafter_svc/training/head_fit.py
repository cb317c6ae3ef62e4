"""Linear heads by Newton's method: what is to be learned is too little for the noise of stochastic steps.

The loss of a row is that of a softmax over the output layer's scores. A step goes down its slope, as far as the mean
curvature of the softmax says that it pays, and the inputs' second moments tell them apart (a natural-gradient step).

Axes: N rows, P places, D inputs of a head, H numbers of a row before the output layer, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# Shares of the mean moment and curvature that are added to each, so that what was hardly seen changes little.
_MOMENT_RIDGE = 0.1
_CURVATURE_RIDGE = 0.1
# Fractions of a step that are tried.
_SHARES = (0.025, 0.05, 0.1, 0.2, 0.5, 1.0)


class HeadSums:
    """Sums over all rows that a step needs."""

    def __init__(self, num_places: int, num_inputs: int, hidden: int) -> None:
        self._moments = torch.zeros(num_inputs, num_inputs)
        self._slopes = torch.zeros(num_places, hidden, num_inputs)
        self._curvatures = torch.zeros(num_places, hidden, hidden)
        # Rows that were added, and those whose curvature was.
        self._counts = torch.zeros(2)

    def state(self) -> tuple[Tensor, ...]:
        """State for `restore`."""
        return self._moments, self._slopes, self._curvatures, self._counts

    def restore(self, state: tuple[Tensor, ...]) -> None:
        """Restore a state."""
        self._moments, self._slopes, self._curvatures, self._counts = state

    def add(self, inputs: Tensor, slopes: Tensor) -> None:
        """Rows' inputs [N, D], and how the loss falls with what heads add [N, P, H]."""
        self._moments += inputs.T @ inputs
        self._slopes += torch.einsum("nph,nd->phd", slopes, inputs)
        self._counts[0] += len(inputs)

    def add_curvature(self, probabilities: Tensor, table: Tensor) -> None:
        """Some rows' probabilities [N, P, V] and the output layer [V, H]: a sample will do."""
        for place, own in enumerate(probabilities.unbind(1)):
            means = own @ table
            self._curvatures[place] += (table * own.sum(0)[:, None]).T @ table - means.T @ means
        self._counts[1] += len(probabilities)

    def step(self) -> Tensor:
        """Step of the heads [P, H, D]."""
        moments = _with_ridge(self._moments / self._counts[0], _MOMENT_RIDGE)
        curvatures = [_with_ridge(one / self._counts[1], _CURVATURE_RIDGE) for one in self._curvatures]
        along = torch.linalg.solve(moments, self._slopes / self._counts[0], left=False)
        return torch.stack([torch.linalg.solve(*pair) for pair in zip(curvatures, along, strict=True)])

    def reduced(self, heads: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        """Matrices [rank, D] and [P, H, rank] whose products are closest to heads [P, H, D], in what they change."""
        inputs, inputs_back = _roots(_with_ridge(self._moments / self._counts[0], _MOMENT_RIDGE))
        outputs, outputs_back = zip(
            *(_roots(_with_ridge(one / self._counts[1], _CURVATURE_RIDGE)) for one in self._curvatures), strict=True
        )
        weighted = torch.cat([root @ head @ inputs for root, head in zip(outputs, heads, strict=True)])
        left, sizes, right = torch.linalg.svd(weighted, full_matrices=False)
        up = (left[:, :rank] * sizes[:rank]).unflatten(0, (len(heads), -1))
        return right[:rank] @ inputs_back, torch.stack([back @ own for back, own in zip(outputs_back, up, strict=True)])


def best_shares(losses: Callable[[float], Tensor], known: Tensor) -> tuple[Tensor, Tensor]:
    """For each place the share of a step after which its loss is least, and that loss [P].

    A share is 0 where none lowers the `known` losses [P]: rows that the heads know little of are curved more than all
    are on average, so that a whole step is often too far.
    """
    found = torch.stack([known, *(losses(share) for share in _SHARES)])
    best = found.argmin(0)
    return torch.tensor([0.0, *_SHARES])[best], found.gather(0, best[None])[0]


def _with_ridge(matrix: Tensor, share: float) -> Tensor:
    return matrix + share * matrix.diagonal().mean() * torch.eye(len(matrix))


def _roots(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The root of a symmetric matrix, and its inverse."""
    values, vectors = torch.linalg.eigh(matrix)
    roots = values.clamp_min(1e-12).sqrt()
    return (vectors * roots) @ vectors.T, (vectors / roots) @ vectors.T
