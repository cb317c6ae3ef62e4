"""Age-weighted linear regression, as ProPD fits times to tree sizes, with an anchor for what the data leave open."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]
Matrix = npt.NDArray[np.float64]

# Errors beyond this many times the usual one count as that many: a pass that was held up says nothing about passes.
_OUTLIER = 4.0
# Nor are errors up to this share of what was expected.
_NORMAL_SHARE = 0.15
# How many times the anchor of a slow feature outweighs that of others.
_SLOW_WEIGHT = 1000.0
# Weight of an observation in the usual error.
_ERROR_RATE = 0.1
# For how many observations what was restored counts, at most: in what lasts, and in what follows the load.
RESTORED_LASTING = 64.0
RESTORED_RECENT = 8.0


@dataclass(frozen=True)
class Evidence:
    """What a regression has seen: `weight` observations, and means over them.

    `products` are the means of products of features, row by row up to the diagonal, `moments` those of features times
    target. The first feature is the constant.

    Raises:
        ValueError: a number that no observations could give.
    """

    weight: float
    products: tuple[float, ...]
    moments: tuple[float, ...]

    def __post_init__(self) -> None:
        size = len(self.moments)
        if len(self.products) != size * (size + 1) // 2 or not math.isfinite(sum(self.moments)):
            raise ValueError(f"{len(self.products)} products of {size} features")
        matrix = self.matrix()
        if not 0 <= self.weight < math.inf or not np.isfinite(matrix).all() or (self.weight and matrix[0, 0] != 1):
            raise ValueError("no weights of observations")
        # As far as single precision goes.
        if np.linalg.eigvalsh(matrix)[0] < -1e-5 * np.trace(matrix) or np.diagonal(matrix).min() < 0:
            raise ValueError("no products of features")

    def matrix(self) -> Vector:
        """The products as a symmetric matrix."""
        size = len(self.moments)
        matrix = np.zeros((size, size))
        matrix[np.tril_indices(size)] = self.products
        return matrix + np.tril(matrix, -1).T


class AgeWeightedRegression:
    """Fits target = coefficients . features; an observation that is `n` others old weighs `decay` ** n.

    Only weighted sums are kept, so that an observation costs the same however many there were. `anchor_weights` say for
    how many typical observations of a feature the anchor stands; where features do not vary, it decides. The first
    feature is the constant.
    """

    def __init__(self, num_features: int, decay: float, anchor_weights: Sequence[float]) -> None:
        self._decay = decay
        self._anchor_weights = np.array(anchor_weights)
        # Of features with features and, in the last column, with the target.
        self._sums = np.zeros((num_features, num_features + 1))
        self.coefficients: Vector = np.zeros(num_features)

    def add(self, features: Vector, target: float) -> None:
        """Take an observation in; `solve` makes it count."""
        self.add_products(products_of(features, target))

    def add_products(self, products: Matrix) -> None:
        """As `add`, for what several regressions take in."""
        self._sums *= self._decay
        self._sums += products

    def evidence(self) -> Evidence:
        """What was seen, by weight."""
        weight = float(self._sums[0, 0])
        means = self._sums / (weight or 1.0)
        products, moments = means[:, :-1], means[:, -1]
        return Evidence(weight, tuple(products[np.tril_indices(len(moments))].tolist()), tuple(moments.tolist()))

    def restore(self, evidence: Evidence, most: float) -> None:
        """Begin with what was seen elsewhere, as if it had been `most` observations at most."""
        weight = min(evidence.weight, most)
        self._sums = weight * np.column_stack((evidence.matrix(), evidence.moments))

    def solve(self, anchor: Vector) -> Vector:
        """The coefficients that minimise the weighted squared error, held to the anchor where there is little data."""
        total = self._sums[0, 0]
        if total == 0:
            return self.coefficients
        products = self._sums[:, :-1].copy()
        diagonal = products.reshape(-1)[:: len(products) + 1]
        # In units of a typical observation of each feature, so that it does not matter what these are measured in.
        strength = self._anchor_weights * diagonal / total + 1e-9
        diagonal += strength
        self.coefficients = np.linalg.solve(products, self._sums[:, -1] + strength * anchor)
        return self.coefficients


def products_of(features: Vector, target: float) -> Matrix:
    """Of features with features and, in the last column, with the target."""
    products = np.empty((len(features), len(features) + 1))
    np.multiply.outer(features, features, out=products[:, :-1])
    np.multiply(features, target, out=products[:, -1])
    return products


class RobustRegression:
    """A regression of recent observations, anchored to one with a long memory; neither trusts outliers.

    The recent one follows load and machine. What does not vary for a while, such as whether drafters are asked, keeps
    the effect that it had when it did.
    """

    def __init__(
        self, num_features: int, recent: float, lasting: float, normal_error: float, slow: Sequence[int] = ()
    ) -> None:
        """`recent` and `lasting` are after how many observations one weighs half.

        Features in `slow` drift with time, and only the lasting regression learns what they do: a recent trend is not
        theirs. Errors up to `normal_error` are never outliers, so that what was the same for long can change, too.
        """
        # The constant has no anchor: until something varies, it explains everything and all effects are 0.
        weights = [0.0] + [1.0] * (num_features - 1)
        for feature in slow:
            weights[feature] = _SLOW_WEIGHT
        self._lasting = AgeWeightedRegression(num_features, 0.5 ** (1 / lasting), [0.02 * weight for weight in weights])
        self._recent = AgeWeightedRegression(num_features, 0.5 ** (1 / recent), [4.0 * weight for weight in weights])
        self._nothing: Vector = np.zeros(num_features)
        self._normal_error = normal_error
        self._usual_error = 0.0
        self.num_observations = 0

    @property
    def coefficients(self) -> Vector:
        """As of the last `solve`."""
        return self._recent.coefficients

    def evidence(self) -> Evidence:
        """What the lasting regression has seen."""
        return self._lasting.evidence()

    def restore(self, evidence: Evidence) -> None:
        """Begin with what was seen elsewhere, which a few observations of this place's own outweigh.

        It says nothing of what is an outlier: these are judged by what is seen here.
        """
        self._lasting.restore(evidence, RESTORED_LASTING)
        self._recent.restore(evidence, RESTORED_RECENT)
        self.solve()

    def add(self, features: Vector, target: float) -> None:
        """Take an observation in, as far as it can be believed."""
        self.num_observations += 1
        expected = float(features @ self.coefficients)
        error = abs(target - expected)
        if self.num_observations > 8:
            limit = _OUTLIER * self._usual_error + _NORMAL_SHARE * abs(expected) + self._normal_error
            target = min(max(target, expected - limit), expected + limit)
            # Held to the limit too: a single outlier must not open the door to the next, a lasting change has to.
            error = min(error, limit)
        self._usual_error += max(_ERROR_RATE, 1 / self.num_observations) * (error - self._usual_error)
        products = products_of(features, target)
        self._lasting.add_products(products)
        self._recent.add_products(products)

    def solve(self) -> Vector:
        """Fit again; returns the coefficients."""
        return self._recent.solve(self._lasting.solve(self._nothing))
