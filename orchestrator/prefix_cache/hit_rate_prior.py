"""How much better or worse one request's guesses fare than those of all requests."""

from __future__ import annotations

from dataclasses import dataclass

# Guesses that "as all others" is worth, and most that what is known of a prompt's beginning is worth.
_WEIGHT = 4.0
_MOST_KNOWN = 16.0
_LEAST, _MOST = 0.2, 1.5


@dataclass
class HitRatePrior:
    """Right guesses of this request, and how many of them the common rates had expected."""

    hits: float = 0.0
    expected: float = 0.0
    # What requests with the same beginning make likely, as if it were guesses of this one.
    _known_hits: float = 0.0
    _known_expected: float = 0.0

    def know(self, hits: float, expected: float) -> None:
        """Take what earlier requests have shown for a few guesses of this one's."""
        share = min(1.0, _MOST_KNOWN / expected) if expected > 0 else 0.0
        self._known_hits, self._known_expected = hits * share, expected * share

    @property
    def factor(self) -> float:
        """What to multiply the common rates by."""
        hits, expected = self.hits + self._known_hits, self.expected + self._known_expected
        return min(_MOST, max(_LEAST, (hits + _WEIGHT) / (expected + _WEIGHT)))
