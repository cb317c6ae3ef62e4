"""Age-weighted linear regression, as ProPD fits times to tree sizes, with an anchor for what the data leave open."""

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

    def matrix(self) -> Matrix:
        """The products as a symmetric matrix."""
        return _symmetric(self.products, len(self.moments))


class AgeWeightedRegression:
    """Fits target = coefficients . features; an observation that is `n` others old weighs `decay` ** n.

    Only weighted sums are kept, so that an observation costs the same however many there were. `anchor_weights` say for
    how many typical observations of a feature the anchor stands; where features do not vary, it decides. The first
    feature is the constant.
    """

    def __init__(self, num_features: int, decay: float, anchor_weights: Sequence[float]) -> None:
        self._decay = decay
        self._anchor_weights: Vector = np.array(anchor_weights)
        # Of features with features, row by row up to the diagonal, and then with the target. Every pass adds to so few
        # numbers, which a list does sooner than an array.
        self._sums = [0.0] * (num_features * (num_features + 3) // 2)
        self.coefficients: Vector = np.zeros(num_features)

    def add(self, features: Sequence[float], target: float) -> None:
        """Take an observation in; `solve` makes it count."""
        self.add_products(products_of(features, target))

    def add_products(self, products: Sequence[float]) -> None:
        """As `add`, for what several regressions take in."""
        decay = self._decay
        self._sums = [decay * total + product for total, product in zip(self._sums, products, strict=True)]

    def evidence(self) -> Evidence:
        """What was seen, by weight."""
        weight = self._sums[0]
        means = [total / (weight or 1.0) for total in self._sums]
        size = len(self.coefficients)
        return Evidence(weight, tuple(means[:-size]), tuple(means[-size:]))

    def restore(self, evidence: Evidence, most: float) -> None:
        """Begin with what was seen elsewhere, as if it had been `most` observations at most."""
        weight = min(evidence.weight, most)
        self._sums = [weight * mean for mean in (*evidence.products, *evidence.moments)]

    def solve(self, anchor: Vector) -> Vector:
        """The coefficients that minimise the weighted squared error, held to the anchor where there is little data."""
        total, size = self._sums[0], len(self.coefficients)
        if total == 0:
            return self.coefficients
        products, moments = _symmetric(self._sums[:-size], size), np.array(self._sums[-size:])
        diagonal = products.reshape(-1)[:: len(products) + 1]
        # In units of a typical observation of each feature, so that it does not matter what these are measured in.
        strength = self._anchor_weights * diagonal / total + 1e-9
        diagonal += strength
        self.coefficients = np.asarray(np.linalg.solve(products, moments + strength * anchor), dtype=np.float64)
        return self.coefficients


def products_of(features: Sequence[float], target: float) -> list[float]:
    """Of features with features, row by row up to the diagonal, and then with the target."""
    products = [features[row] * features[column] for row, column in _lower(len(features))]
    products += [feature * target for feature in features]
    return products


@cache
def _lower(size: int) -> tuple[tuple[int, int], ...]:
    return tuple((row, column) for row in range(size) for column in range(row + 1))


@cache
def _places(size: int) -> npt.NDArray[np.intp]:
    """Where the entries of a symmetric matrix are among those up to its diagonal."""
    places = np.zeros((size, size), dtype=np.intp)
    places[np.tril_indices(size)] = range(size * (size + 1) // 2)
    return np.maximum(places, places.T)


def _symmetric(products: Sequence[float], size: int) -> Matrix:
    matrix: Matrix = np.array(products)[_places(size)]
    return matrix


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
        # The coefficients of the last fit, and whether nothing has come since.
        self._known = [0.0] * num_features
        self._is_fitted = False
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
        self._is_fitted = False
        self.solve()

    def add(self, features: Sequence[float], target: float) -> None:
        """Take an observation in, as far as it can be believed."""
        self.num_observations += 1
        self._is_fitted = False
        expected = sum(map(operator.mul, features, self._known))
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
        """Fit again, if there is anything new; returns the coefficients."""
        if not self._is_fitted:
            self._recent.solve(self._lasting.solve(self._nothing))
            self._known = self._recent.coefficients.tolist()
            self._is_fitted = True
        return self._recent.coefficients
