"""Records of several drafters' trees for the same rounds: durations, and accepted tokens of one besides another."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

# Least rounds compared, and trees of a drafter, before records are used.
FEWEST_ROUNDS = 8
# Weight of a round, or a tree, in running means.
_RATE = 1 / 16
# A held tree is released when the awaited one is late by this many mean deviations.
_LATE = 2.0


@dataclass(slots=True)
class _Mean:
    """Running mean and mean absolute deviation."""

    count: int = 0
    value: float = 0.0
    spread: float = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        rate = max(_RATE, 1 / self.count)
        self.spread += rate * (abs(value - self.value) * (self.count > 1) - self.spread)
        self.value += rate * (value - self.value)

    @property
    def is_known(self) -> bool:
        return self.count >= FEWEST_ROUNDS


@dataclass
class SourceRecords:
    """Records of all requests of one kind.

    Committed tokens do not depend on drafts. They therefore give the accepted tokens of every tree, late and unverified
    ones too, and the gain from waiting.
    """

    # Rounds whose first tree was held for another one.
    num_waits: int = 0
    _seconds: defaultdict[str, _Mean] = field(default_factory=lambda: defaultdict(_Mean))
    _gains: defaultdict[tuple[str, str], _Mean] = field(default_factory=lambda: defaultdict(_Mean))

    def took(self, source: str, seconds: float) -> None:
        """Record the duration of a source's tree."""
        self._seconds[source].add(seconds)

    def compare(self, accepted: Mapping[str, int]) -> None:
        """Record one round's accepted tokens of each source's tree."""
        for one, its in accepted.items():
            for other, others in accepted.items():
                if one != other:
                    self._gains[one, other].add(max(0, others - its))

    def worthwhile_wait_s(
        self, there: Collection[str], missing: Collection[str], elapsed_s: float, tokens_per_s: float
    ) -> float:
        """Longest worthwhile wait of a round for more trees, in seconds; 0 for none.

        `there` are sources whose trees have arrived, `elapsed_s` seconds after they were asked. A tree is worth its
        wait if it is expected to add more tokens than all requests commit in that time.
        """
        longest_s = 0.0
        for source in missing:
            seconds, gains = self._seconds[source], [self._gains[one, source] for one in there]
            latest_s = seconds.value + _LATE * seconds.spread - elapsed_s
            if not seconds.is_known or not all(gain.is_known for gain in gains):
                continue
            gain = min(gain.value for gain in gains)
            if gain > tokens_per_s * max(0.0, seconds.value - elapsed_s):
                longest_s = max(longest_s, latest_s)
        return longest_s
