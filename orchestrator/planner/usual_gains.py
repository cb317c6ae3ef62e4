"""What drafts usually gain, by the kind of request: it depends on drafters and texts, not on the verifier."""

from __future__ import annotations

# Weight of a round in a running mean.
_RATE = 0.05


class UsualGains:
    """Running means of gains, relative to that of a usual draft: of all rounds, of greedy requests and of others."""

    def __init__(self) -> None:
        self.mean = 1.0
        self._greedy = self._sampled = 1.0

    def of_class(self, is_greedy: bool) -> float:
        """Relative gain that a request of a class is expected to have."""
        return self._greedy if is_greedy else self._sampled

    def restore(self, mean: float, greedy: float, sampled: float) -> None:
        """Begin with what was seen elsewhere."""
        self.mean, self._greedy, self._sampled = mean, greedy, sampled

    def add(self, relative_gain: float, is_greedy: bool) -> None:
        """A round that had asked for drafts accepted so much."""
        if is_greedy:
            self._greedy += _RATE * (relative_gain - self._greedy)
        else:
            self._sampled += _RATE * (relative_gain - self._sampled)
        self.mean += _RATE * (relative_gain - self.mean)
