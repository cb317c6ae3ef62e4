"""Age-weighted linear regression, as in ProPD for times by tree size, with anchors for undetermined features."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]
Matrix = npt.NDArray[np.float64]

# Clip errors at this many usual ones: delayed passes are not representative.
_OUTLIER = 4.0
# Errors up to this share of the prediction are never outliers.
_NORMAL_SHARE = 0.15
# Ratio of a slow feature's anchor weight to that of others.
_SLOW_WEIGHT = 1000.0
# Weight of an observation in the usual error.
_ERROR_RATE = 0.1
# Upper bounds of a restored regression's weight in observations: lasting and recent.
RESTORED_LASTING = 64.0
RESTORED_RECENT = 8.0


@dataclass(frozen=True)
class Evidence:
    """Statistics of a regression: `weight` observations, and means over them.

    `products` are means of products of features (lower triangle by rows), `moments` of features times target. The first
    feature is the constant.

    Raises:
        ValueError: impossible numbers.
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
        # Within single precision.
        if np.linalg.eigvalsh(matrix)[0] < -1e-5 * np.trace(matrix) or np.diagonal(matrix).min() < 0:
            raise ValueError("no products of features")

    def matrix(self) -> Matrix:
        """Products as a symmetric matrix."""
        return _symmetric(self.products, len(self.moments))


class AgeWeightedRegression:
    """Fits target = coefficients . features; an observation `n` others ago has weight `decay` ** n.

    Only weighted sums are kept, at constant cost per observation. `anchor_weights` are the anchor's weights in typical
    observations of each feature; without variation of a feature, the anchor decides. The first feature is the constant.
    """

    def __init__(self, num_features: int, decay: float, anchor_weights: Sequence[float]) -> None:
        self._decay = decay
        self._anchor_weights: Vector = np.array(anchor_weights)
        # Sums of products of features (lower triangle by rows), then of features with the target. A list: faster than
        # an array for so few numbers.
        self._sums = [0.0] * (num_features * (num_features + 3) // 2)
        self.coefficients: Vector = np.zeros(num_features)

    def add(self, features: Sequence[float], target: float) -> None:
        """Add an observation; effective after `solve`."""
        self.add_products(products_of(features, target))

    def add_products(self, products: Sequence[float]) -> None:
        """Add an observation given by its products, which several regressions share."""
        decay = self._decay
        self._sums = [decay * total + product for total, product in zip(self._sums, products, strict=True)]

    def evidence(self) -> Evidence:
        """Weighted means of observations."""
        weight = self._sums[0]
        means = [total / (weight or 1.0) for total in self._sums]
        size = len(self.coefficients)
        return Evidence(weight, tuple(means[:-size]), tuple(means[-size:]))

    def restore(self, evidence: Evidence, most: float) -> None:
        """Start from other statistics, with a weight of at most `most` observations."""
        weight = min(evidence.weight, most)
        self._sums = [weight * mean for mean in (*evidence.products, *evidence.moments)]

    def solve(self, anchor: Vector) -> Vector:
        """Coefficients of least weighted squared error, regularised towards the anchor."""
        total, size = self._sums[0], len(self.coefficients)
        if total == 0:
            return self.coefficients
        products, moments = _symmetric(self._sums[:-size], size), np.array(self._sums[-size:])
        diagonal = products.reshape(-1)[:: len(products) + 1]
        # In units of a typical observation of each feature, so that scales do not matter.
        strength = self._anchor_weights * diagonal / total + 1e-9
        diagonal += strength
        self.coefficients = np.asarray(np.linalg.solve(products, moments + strength * anchor), dtype=np.float64)
        return self.coefficients


def products_of(features: Sequence[float], target: float) -> list[float]:
    """Products of features (lower triangle by rows), then of features with the target."""
    products = [features[row] * features[column] for row, column in _lower(len(features))]
    products += [feature * target for feature in features]
    return products


@cache
def _lower(size: int) -> tuple[tuple[int, int], ...]:
    return tuple((row, column) for row in range(size) for column in range(row + 1))


@cache
def _places(size: int) -> npt.NDArray[np.intp]:
    """Indices of a symmetric matrix's entries in its lower triangle."""
    places = np.zeros((size, size), dtype=np.intp)
    places[np.tril_indices(size)] = range(size * (size + 1) // 2)
    return np.maximum(places, places.T)


def _symmetric(products: Sequence[float], size: int) -> Matrix:
    matrix: Matrix = np.array(products)[_places(size)]
    return matrix


class RobustRegression:
    """Regression of recent observations, anchored to one with a long memory; both clip outliers.

    The recent one follows load and machine. A feature without recent variation, such as whether drafters are asked,
    keeps its earlier coefficient.
    """

    def __init__(
        self, num_features: int, recent: float, lasting: float, normal_error: float, slow: Sequence[int] = ()
    ) -> None:
        """`recent` and `lasting` are half-lives in observations.

        Features in `slow` drift with time, and only the lasting regression fits them: recent trends have other causes.
        Errors up to `normal_error` are never outliers, so that a long-constant target can change.
        """
        # No anchor for the constant: without variation it explains the target, and all effects are 0.
        weights = [0.0] + [1.0] * (num_features - 1)
        for feature in slow:
            weights[feature] = _SLOW_WEIGHT
        self._lasting = AgeWeightedRegression(num_features, 0.5 ** (1 / lasting), [0.02 * weight for weight in weights])
        self._recent = AgeWeightedRegression(num_features, 0.5 ** (1 / recent), [4.0 * weight for weight in weights])
        self._nothing: Vector = np.zeros(num_features)
        self._normal_error = normal_error
        self._usual_error = 0.0
        # Coefficients of the last fit, and whether they are up to date.
        self._known = [0.0] * num_features
        self._is_fitted = False
        self.num_observations = 0

    @property
    def coefficients(self) -> Vector:
        """Coefficients of the last `solve`."""
        return self._recent.coefficients

    def evidence(self) -> Evidence:
        """Statistics of the lasting regression."""
        return self._lasting.evidence()

    def restore(self, evidence: Evidence) -> None:
        """Start from other statistics, which a few observations outweigh.

        Outliers are judged by observations here only.
        """
        self._lasting.restore(evidence, RESTORED_LASTING)
        self._recent.restore(evidence, RESTORED_RECENT)
        self._is_fitted = False
        self.solve()

    def add(self, features: Sequence[float], target: float) -> None:
        """Add an observation, clipped if it is an outlier."""
        self.num_observations += 1
        self._is_fitted = False
        expected = sum(map(operator.mul, features, self._known))
        error = abs(target - expected)
        if self.num_observations > 8:
            limit = _OUTLIER * self._usual_error + _NORMAL_SHARE * abs(expected) + self._normal_error
            target = min(max(target, expected - limit), expected + limit)
            # Clipped too: a single outlier must not admit the next, a lasting change must.
            error = min(error, limit)
        self._usual_error += max(_ERROR_RATE, 1 / self.num_observations) * (error - self._usual_error)
        products = products_of(features, target)
        self._lasting.add_products(products)
        self._recent.add_products(products)

    def solve(self) -> Vector:
        """Fit if there are new observations; returns the coefficients."""
        if not self._is_fitted:
            self._recent.solve(self._lasting.solve(self._nothing))
            self._known = self._recent.coefficients.tolist()
            self._is_fitted = True
        return self._recent.coefficients
