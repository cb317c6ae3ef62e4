"""Values of the prefix cache: the tokens that followed a context, and statistics of requests that began alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from coppice.core.tree import ROOT
from orchestrator.planner.base import DraftGain
from orchestrator.request.statistics import SourceTotals, Statistics

MAX_NODES = 128
MAX_DEPTH = 64
MAX_COUNT = 1 << 16
# Statistics: counts of tokens beyond this are halved, all together, so that old requests fade.
_MOST_TOKENS = 1 << 16
MAX_SOURCES = 16
MAX_SOURCE_BYTES = 64
MAX_TOTAL = 1 << 40


class InvalidValueError(ValueError):
    """Something that is no value of the prefix cache."""


@dataclass(frozen=True)
class Continuations:
    """Tokens after a context as parallel arrays, parents before children; `counts` say how often each was seen.

    Raises:
        InvalidValueError: arrays of different lengths, more than `MAX_NODES` nodes or `MAX_DEPTH` levels, a parent that
            is not an earlier node, a repeated child, or a count that is not positive or above its parent's.
    """

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        size = len(self.token_ids)
        if size > MAX_NODES or len(self.parents) != size or len(self.counts) != size:
            raise InvalidValueError(f"{size} tokens, {len(self.parents)} parents and {len(self.counts)} counts")
        depths: list[int] = []
        seen: set[tuple[int, int]] = set()
        for node, (token, parent, count) in enumerate(zip(self.token_ids, self.parents, self.counts, strict=True)):
            if not ROOT <= parent < node or (parent, token) in seen:
                raise InvalidValueError(f"node {node} has no place in the tree")
            if not 1 <= count <= (MAX_COUNT if parent == ROOT else self.counts[parent]):
                raise InvalidValueError(f"node {node} was seen {count} times")
            depths.append(1 if parent == ROOT else depths[parent] + 1)
            if depths[-1] > MAX_DEPTH:
                raise InvalidValueError(f"node {node} lies deeper than {MAX_DEPTH}")
            seen.add((parent, token))

    def with_path(self, path: Sequence[int]) -> Continuations:
        """The tree after its context was followed by `path` once more, of which the first `MAX_DEPTH` tokens count.

        Where it would grow beyond its bounds, old counts are halved first, and then the rarest nodes go.
        """
        growing = _Growing(self)
        on_path = growing.add(path[:MAX_DEPTH])
        if growing.is_too_large:
            growing.age(on_path)
        return growing.best(on_path)

    def paths(self) -> Iterator[tuple[int, ...]]:
        """Tokens from the root to each leaf, the rarest leaf first."""
        leaves = set(range(len(self.token_ids))) - set(self.parents)
        for leaf in sorted(leaves, key=lambda node: (self.counts[node], node)):
            path: list[int] = []
            node = leaf
            while node != ROOT:
                path.append(self.token_ids[node])
                node = self.parents[node]
            yield tuple(reversed(path))


class _Growing:
    """A tree under change."""

    def __init__(self, tree: Continuations) -> None:
        self._token_ids = list(tree.token_ids)
        self._parents = list(tree.parents)
        self._counts = list(tree.counts)

    @property
    def is_too_large(self) -> bool:
        return len(self._token_ids) > MAX_NODES or max(self._counts, default=0) > MAX_COUNT

    def add(self, path: Sequence[int]) -> set[int]:
        """Count a path; returns its nodes."""
        children = {key: node for node, key in enumerate(zip(self._parents, self._token_ids, strict=True))}
        at, nodes = ROOT, set[int]()
        for token in path:
            child = children.get((at, token))
            if child is None:
                child = len(self._token_ids)
                self._token_ids.append(token)
                self._parents.append(at)
                self._counts.append(0)
            self._counts[child] += 1
            nodes.add(child)
            at = child
        return nodes

    def age(self, fresh: set[int]) -> None:
        """Halve all counts; what was just seen stays."""
        self._counts = [max(count // 2, node in fresh) for node, count in enumerate(self._counts)]

    def best(self, fresh: set[int]) -> Continuations:
        """The nodes that were seen most, and of those that were seen as often, the fresh ones and then the older ones.

        No node is seen more often than its parent, nor fresh where its parent is not: so what is kept is a tree.
        """
        if len(self._counts) <= MAX_NODES and 0 not in self._counts:
            return Continuations(tuple(self._token_ids), tuple(self._parents), tuple(self._counts))
        ranked = sorted(range(len(self._counts)), key=lambda node: (-self._counts[node], node not in fresh, node))
        kept = sorted(node for node in ranked[:MAX_NODES] if self._counts[node])
        renumbered = {ROOT: ROOT, **{old: new for new, old in enumerate(kept)}}
        return Continuations(
            token_ids=tuple(self._token_ids[node] for node in kept),
            parents=tuple(renumbered[self._parents[node]] for node in kept),
            counts=tuple(self._counts[node] for node in kept),
        )


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
        if len(self.sources) > MAX_SOURCES or not all(0 <= count <= MAX_TOTAL for count in counts):
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
