"""Values of the prefix cache: continuations of a context, and statistics of requests with the same beginning."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass

from coppice.core.tree import ROOT
from orchestrator.request.statistics import DraftGain, Statistics

MAX_NODES = 128
MAX_DEPTH = 64
MAX_COUNT = 1 << 16
# Tokens at which statistics are halved, so that old requests fade.
_MOST_TOKENS = 1 << 16
MAX_TOTAL = 1 << 40


class InvalidValueError(ValueError):
    """Invalid value of the prefix cache."""


@dataclass(frozen=True)
class Continuations:
    """Tree of continuations as parallel arrays, parents before children; `counts` are occurrences.

    Raises:
        InvalidValueError: lengths differ, more than `MAX_NODES` nodes or `MAX_DEPTH` levels, a parent that is not an
            earlier node, a repeated child, or a count that is not positive or above its parent's.
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
        """The tree with one more occurrence of `path`, of which the first `MAX_DEPTH` tokens count.

        If it exceeds its bounds, old counts are halved and the rarest nodes dropped.
        """
        growing = _Growing(self)
        on_path = growing.add(path[:MAX_DEPTH])
        if growing.is_too_large:
            growing.age(on_path)
        return growing.best(on_path)

    def paths(self) -> Iterator[tuple[int, ...]]:
        """Tokens from the root to each leaf, rarest leaf first."""
        leaves = set(range(len(self.token_ids))) - set(self.parents)
        for leaf in sorted(leaves, key=lambda node: (self.counts[node], node)):
            path: list[int] = []
            node = leaf
            while node != ROOT:
                path.append(self.token_ids[node])
                node = self.parents[node]
            yield tuple(reversed(path))


class _Growing:
    """Tree under modification."""

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
        """Halve all counts; nodes just seen keep at least 1."""
        self._counts = [max(count // 2, node in fresh) for node, count in enumerate(self._counts)]

    def best(self, fresh: set[int]) -> Continuations:
        """The most frequent nodes; ties go to fresh nodes, then to older ones.

        Counts and freshness never exceed the parent's, so the kept nodes form a tree.
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
    """Counts over requests: rounds and the tokens that they committed.

    `guess_hits` are right guesses of the cache, `guess_expectation_milli` the thousandths of hits expected. Of
    `asked_rounds` that asked for drafts, `gain_milli` is the total gain, in thousandths of a typical draft's.

    Raises:
        InvalidValueError: a count is negative or above `MAX_TOTAL`.
    """

    rounds: int = 0
    tokens: int = 0
    guess_hits: int = 0
    guess_expectation_milli: int = 0
    asked_rounds: int = 0
    gain_milli: int = 0

    def __post_init__(self) -> None:
        if not all(0 <= count <= MAX_TOTAL for count in astuple(self)):
            raise InvalidValueError("statistics out of bounds")

    @classmethod
    def of(
        cls, statistics: Statistics, guess_hits: float, guess_expectation: float, gain: DraftGain
    ) -> PrefixStatistics:
        """Statistics of one request."""
        return cls(
            rounds=statistics.rounds,
            tokens=statistics.rounds + statistics.accepted_tokens,
            guess_hits=round(guess_hits),
            guess_expectation_milli=round(1000 * guess_expectation),
            asked_rounds=gain.rounds,
            gain_milli=round(1000 * gain.total),
        )

    @property
    def gain(self) -> DraftGain:
        """Gain of drafts."""
        return DraftGain(self.asked_rounds, self.gain_milli / 1000)

    def plus(self, other: PrefixStatistics) -> PrefixStatistics:
        """Sum of both, halved above `_MOST_TOKENS` tokens."""
        sums = [own + more for own, more in zip(astuple(self), astuple(other), strict=True)]
        if self.tokens + other.tokens > _MOST_TOKENS:
            sums = [count // 2 for count in sums]
        return PrefixStatistics(*sums)
