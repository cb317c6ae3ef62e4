"""What requests that began with the same tokens have shown: how much was accepted, and from whom."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from orchestrator.planner.base import DraftGain
from orchestrator.prefix_cache.continuations import InvalidValueError
from orchestrator.request.statistics import SourceTotals, Statistics

# Counts beyond this are halved, all together, so that old requests fade.
_MOST_TOKENS = 1 << 16
MAX_SOURCES = 16
MAX_SOURCE_BYTES = 64
MAX_COUNT = 1 << 40


@dataclass(frozen=True)
class PrefixStatistics:
    """Counts over requests: rounds, tokens that they committed, and nodes of each source, proposed and accepted.

    `guess_hits` are right guesses of the cache, `guess_expectation_milli` how many were expected, in thousandths. Of
    `asked_rounds` that had asked for drafts, these gained `gain_milli`, in thousandths of what usual ones gain.

    Raises:
        InvalidValueError: a count is negative or absurd, more accepted than proposed, or too many sources.
    """

    rounds: int = 0
    tokens: int = 0
    guess_hits: int = 0
    guess_expectation_milli: int = 0
    sources: Mapping[str, SourceTotals] = field(default_factory=lambda: MappingProxyType({}))
    asked_rounds: int = 0
    gain_milli: int = 0

    def __post_init__(self) -> None:
        counts = [self.rounds, self.tokens, self.guess_hits, self.guess_expectation_milli]
        counts += [self.asked_rounds, self.gain_milli]
        for name, source in self.sources.items():
            counts += [source.proposed, source.accepted]
            if source.accepted > source.proposed or not 0 < len(name.encode()) <= MAX_SOURCE_BYTES:
                raise InvalidValueError(f"source {name!r} has {source.accepted} accepted of {source.proposed}")
        if len(self.sources) > MAX_SOURCES or not all(0 <= count <= MAX_COUNT for count in counts):
            raise InvalidValueError("statistics out of bounds")

    @classmethod
    def of(
        cls, statistics: Statistics, guess_hits: float, guess_expectation: float, gain: DraftGain
    ) -> PrefixStatistics:
        """Those of one request."""
        return cls(
            rounds=statistics.rounds,
            tokens=statistics.rounds + statistics.accepted_tokens,
            guess_hits=round(guess_hits),
            guess_expectation_milli=round(1000 * guess_expectation),
            sources={name: replace(counts) for name, counts in list(statistics.sources.items())[:MAX_SOURCES]},
            asked_rounds=gain.rounds,
            gain_milli=round(1000 * gain.total),
        )

    @property
    def gain(self) -> DraftGain:
        """What drafts have gained."""
        return DraftGain(self.asked_rounds, self.gain_milli / 1000)

    @property
    def mean_acceptance_length(self) -> float:
        """τ: tokens committed per round; 1 where there was no round."""
        return self.tokens / self.rounds if self.rounds else 1.0

    def plus(self, other: PrefixStatistics) -> PrefixStatistics:
        """Both together."""
        sources = {name: replace(counts) for name, counts in self.sources.items()}
        for name, counts in other.sources.items():
            if name in sources or len(sources) < MAX_SOURCES:
                mine = sources.setdefault(name, SourceTotals())
                mine.proposed += counts.proposed
                mine.accepted += counts.accepted
        total = PrefixStatistics(
            rounds=self.rounds + other.rounds,
            tokens=self.tokens + other.tokens,
            guess_hits=self.guess_hits + other.guess_hits,
            guess_expectation_milli=self.guess_expectation_milli + other.guess_expectation_milli,
            sources=sources,
            asked_rounds=self.asked_rounds + other.asked_rounds,
            gain_milli=self.gain_milli + other.gain_milli,
        )
        return total if total.tokens <= _MOST_TOKENS else total._halved()

    def _halved(self) -> PrefixStatistics:
        return PrefixStatistics(
            rounds=self.rounds // 2,
            tokens=self.tokens // 2,
            guess_hits=self.guess_hits // 2,
            guess_expectation_milli=self.guess_expectation_milli // 2,
            sources={name: SourceTotals(one.proposed // 2, one.accepted // 2) for name, one in self.sources.items()},
            asked_rounds=self.asked_rounds // 2,
            gain_milli=self.gain_milli // 2,
        )
