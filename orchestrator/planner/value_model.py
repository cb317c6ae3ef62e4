"""Values of nodes: drafters' probabilities corrected by acceptance; usual gains of drafts."""

from __future__ import annotations

import itertools
import math
import operator
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from coppice.core.tree import ROOT, TokenTree

# Deeper nodes share this depth's correction.
DEEPEST = 16
# Decay per tree of earlier trees' weight in a correction, and prior weight of a ratio of 1, in tokens.
_FADE = 1 - 1 / 256
_PRIOR_TOKENS = 4.0
# Bounds of corrections, as logs: a wrong drafter may lose all its rows, but never gain many.
_LOWEST, _HIGHEST = -3.0, 0.7
# Bins of path probabilities per unit of their log, down to 2 %.
_BINS_PER_UNIT = 10
NUM_BINS = 40
_LOWEST_BIN = -NUM_BINS / _BINS_PER_UNIT
_BIN_VALUES = tuple(math.exp(-(index + 0.5) / _BINS_PER_UNIT) for index in range(NUM_BINS))
# Memory of the node counts, in trees.
_TREES_AT_HAND = 64
# Upper bounds of restored weights: promised tokens of a source, and trees.
RESTORED_TOKENS = 32.0
RESTORED_TREES = 8.0
# Trees of the same sources count as ordered, likeliest node first, if this many in a row were, up to negligible
# differences of logs.
FEWEST_IN_ORDER = 16
_NO_DIFFERENCE = 1e-3
# Mask of all sources: of every node of a tree without masks.
_EVERY_SOURCE = -1
# Indices of nodes, for zips bounded by the tree.
_NUMBERS = range(sys.maxsize)
# Weight of a round in a running mean.
_RATE = 0.05


@dataclass(frozen=True)
class SourceEvidence:
    """Promised and accepted tokens of a source, at each depth from 1 to `DEEPEST`.

    Raises:
        ValueError: wrong depths or counts.
    """

    promised: tuple[float, ...]
    accepted: tuple[float, ...]

    def __post_init__(self) -> None:
        _check_counts(self.promised, DEEPEST)
        _check_counts(self.accepted, DEEPEST)


@dataclass(frozen=True)
class TreeEvidence:
    """Statistics of trees: their number, mean nodes per tree by value, and promised and accepted tokens by source.

    Raises:
        ValueError: wrong bins or counts.
    """

    num_trees: float
    nodes: tuple[float, ...]
    sources: Mapping[str, SourceEvidence]

    def __post_init__(self) -> None:
        _check_counts(self.nodes, NUM_BINS)
        _check_counts((self.num_trees,), 1)


def _check_counts(counts: Sequence[float], number: int) -> None:
    if len(counts) != number or not all(0 <= count < math.inf for count in counts):
        raise ValueError(f"no {number} counts: {counts}")


class ValueModel:
    """Corrects path probabilities by source and depth, and counts nodes of recent trees by value.

    A depth's correction is the ratio of accepted to promised tokens. It never rises with depth, so that a node's value
    is at most its parent's.
    """

    def __init__(self) -> None:
        self._corrections: dict[str, _SourceCorrection] = {}
        self._counts = [0.0] * NUM_BINS
        self._num_trees = 0.0
        # Corrections for trees of these sources, until one is updated.
        self._known: dict[tuple[str, ...], _TreeCorrections] = {}
        # Consecutive ordered trees of these sources.
        self._num_in_order: dict[tuple[str, ...], int] = {}

    @property
    def has_seen_trees(self) -> bool:
        """Whether any trees were observed."""
        return self._num_trees > 0

    def evidence(self) -> TreeEvidence:
        """Statistics of trees."""
        return TreeEvidence(
            num_trees=self._num_trees,
            nodes=tuple(count / (self._num_trees or 1.0) for count in self._counts),
            sources={name: correction.evidence() for name, correction in self._corrections.items()},
        )

    def restore(self, evidence: TreeEvidence) -> None:
        """Start from other statistics, which a few trees outweigh."""
        self._num_trees = min(evidence.num_trees, RESTORED_TREES)
        self._counts = [self._num_trees * count for count in evidence.nodes]
        for name, source in evidence.sources.items():
            self._corrections[name] = _SourceCorrection()
            self._corrections[name].restore(source)
        self._known.clear()

    def forget(self) -> None:
        """Reset."""
        self._corrections.clear()
        self._known.clear()
        self._num_in_order.clear()
        self._counts = [0.0] * NUM_BINS
        self._num_trees = 0.0

    def learn(self, tree: TokenTree, token_ids: Sequence[int]) -> float:
        """Compare a verified tree with its accepted tokens; returns its corrected expectation of them."""
        accepted = _accepted(tree, token_ids)
        promised = sum(map(math.exp, [value if value < 0 else 0.0 for value in self.path_logs(tree)]))
        probabilities = list(map(math.exp, tree.path_log_probs))
        depths: Sequence[int] = tree.depths
        if tree.depth > DEEPEST:
            depths = [min(depth, DEEPEST) for depth in depths]
        for bit, name in enumerate(tree.source_names):
            correction = self._corrections.get(name)
            if correction is None:
                correction = self._corrections[name] = _SourceCorrection()
            if tree.sources:
                own = [mask >> bit & 1 for mask in tree.sources]
                counted = itertools.compress(zip(depths, probabilities, strict=True), own)
                correction.count(counted, [depths[node] for node in accepted if own[node]])
            else:
                correction.count(zip(depths, probabilities, strict=True), [depths[node] for node in accepted])
        self._known.clear()
        return promised

    def path_logs(self, tree: TokenTree) -> list[float]:
        """Logs of node values, in node order."""
        corrections = self._corrections_of(tree)
        highest = corrections.highest
        if not tree.sources:
            relative = corrections.of_every_source
            return [
                path + highest + relative[depth] for path, depth in zip(tree.path_log_probs, tree.depths, strict=True)
            ]
        return [
            path + highest + corrections[mask][depth]
            for path, depth, mask in zip(tree.path_log_probs, tree.depths, tree.sources, strict=True)
        ]

    def worth(self, tree: TokenTree, least_log: float) -> int | list[int] | None:
        """Nodes whose value has at least this log, with parents, in order; None for all nodes.

        Their number if they are the first ones. On the path of every draft, so it stops as early as possible.
        """
        corrections = self._known.get(tree.source_names)
        if corrections is None or corrections.deepest < len(tree.token_ids):
            corrections = self._corrections_of(tree)
        # Least log of a child's own probability, given the highest correction, and depth of children. Only entries
        # written for this tree are read. The root's entry is last, at index -1.
        least, depths = corrections.least, corrections.child_depths
        least[-1] = least_log - corrections.highest
        if tree.sources:
            return _among_sources(tree, corrections)
        relative = corrections.of_every_source
        # `strict` would take longer than the loop.
        nodes = zip(_NUMBERS, tree.parents, tree.log_probs)  # noqa: B905
        for node, parent, log_prob in nodes:
            least[node] = left = least[parent] - log_prob
            depth = depths[parent]
            if left > relative[depth]:
                break
            depths[node] = depth + 1
        else:
            return None
        if left > 0 and corrections.is_in_order:
            # Below the threshold even with the highest correction, and further nodes are less likely.
            return node
        return _further(nodes, corrections, node)

    def note(self, tree: TokenTree) -> None:
        """Count a tree's nodes by value, and whether they are ordered."""
        self._count_order(tree.source_names, tree.path_log_probs)
        fade = 1 - 1 / _TREES_AT_HAND
        counts = self._counts = [fade * count for count in self._counts]
        self._num_trees = fade * self._num_trees + 1
        for value in self.path_logs(tree):
            if value >= 0:
                counts[0] += 1
            elif value > _LOWEST_BIN:
                counts[int(value * -_BINS_PER_UNIT)] += 1

    def _count_order(self, names: tuple[str, ...], paths: Sequence[float]) -> None:
        """Count whether a tree of these sources is ordered."""
        is_in_order = sorted(paths, reverse=True) == list(paths)
        if not is_in_order:
            # Differences of consecutive nodes.
            is_in_order = max(map(operator.sub, paths[1:], paths)) <= _NO_DIFFERENCE
        before = self._num_in_order.get(names, 0)
        after = self._num_in_order[names] = before + 1 if is_in_order else 0
        if (before < FEWEST_IN_ORDER) != (after < FEWEST_IN_ORDER):
            self._known.pop(names, None)

    def nodes_at_hand(self) -> list[tuple[float, float]]:
        """Values of nodes and mean number per tree, in descending order."""
        if not self._num_trees:
            return []
        return [(value, count / self._num_trees) for value, count in zip(_BIN_VALUES, self._counts, strict=True)]

    def _corrections_of(self, tree: TokenTree) -> _TreeCorrections:
        names = tree.source_names
        known = self._known.get(names)
        if known is None or known.deepest < len(tree):
            logs = [self._corrections[name].logs if name in self._corrections else None for name in names]
            is_in_order = self._num_in_order.get(names, 0) >= FEWEST_IN_ORDER
            known = self._known[names] = _TreeCorrections(logs, max(DEEPEST, len(tree)), is_in_order)
        return known


def _accepted(tree: TokenTree, token_ids: Sequence[int]) -> list[int]:
    """Nodes on the path of these tokens. One pass suffices, since parents come before children."""
    accepted: list[int] = []
    if token_ids:
        wanted = (ROOT, token_ids[0])
        for node, key in enumerate(zip(tree.parents, tree.token_ids, strict=True)):
            if key == wanted:
                accepted.append(node)
                if len(accepted) == len(token_ids):
                    break
                wanted = (node, token_ids[len(accepted)])
    return accepted


def _further(nodes: Iterable[tuple[int, int, float]], corrections: _TreeCorrections, num_first: int) -> int | list[int]:
    """The first nodes, and later ones of sufficient value whose ancestors are kept.

    `nodes` are indices, parents and log-probabilities.
    """
    least, depths, is_in_order = corrections.least, corrections.child_depths, corrections.is_in_order
    relative = corrections.of_every_source
    least[num_first] = math.inf
    kept: list[int] | None = None
    for node, parent, log_prob in nodes:
        least[node] = left = least[parent] - log_prob
        depth = depths[parent]
        if left <= relative[depth]:
            depths[node] = depth + 1
            if kept is None:
                kept = list(range(num_first))
            kept.append(node)
        elif is_in_order and 0 < left < math.inf:
            break
        else:
            least[node] = math.inf
    return num_first if kept is None else kept


def _among_sources(tree: TokenTree, corrections: _TreeCorrections) -> int | list[int] | None:
    """Nodes of sufficient value, in a tree whose nodes have source masks."""
    least, depths, is_in_order = corrections.least, corrections.child_depths, corrections.is_in_order
    kept: list[int] = []
    # `strict` would take longer than the loop.
    nodes = zip(_NUMBERS, tree.parents, tree.log_probs, tree.sources)  # noqa: B905
    for node, parent, log_prob, mask in nodes:
        least[node] = left = least[parent] - log_prob
        depth = depths[parent]
        if left <= corrections[mask][depth]:
            depths[node] = depth + 1
            kept.append(node)
        elif is_in_order and 0 < left < math.inf:
            break
        else:
            least[node] = math.inf
    if len(kept) == len(tree.parents):
        return None
    return len(kept) if not kept or kept[-1] < len(kept) else kept


class _TreeCorrections(dict[int, list[float]]):
    """Corrections by mask of a node's sources and its depth: the best of those of its sources.

    Relative to the highest of all, that of depth 1, for depths up to `deepest`. `of_every_source` are those of nodes
    proposed by all sources, as in trees without masks. `is_in_order`: these trees are ordered. `least` and
    `child_depths` are scratch space for trees of up to `deepest` nodes, and the root.
    """

    __slots__ = ("_of_sources", "child_depths", "deepest", "highest", "is_in_order", "least", "of_every_source")

    def __init__(self, of_sources: Sequence[Sequence[float] | None], deepest: int, is_in_order: bool) -> None:
        """`of_sources` are logs by depth for each bit of a mask, None for unknown sources."""
        super().__init__()
        self._of_sources = of_sources
        self.deepest = deepest
        self.is_in_order = is_in_order
        self.highest = max((0.0 if logs is None else logs[1] for logs in of_sources), default=0.0)
        self.least = [math.inf] * (deepest + 1)
        self.child_depths = [1] * (deepest + 1)
        self.of_every_source = self[_EVERY_SOURCE]

    def __missing__(self, mask: int) -> list[float]:
        named = [logs for bit, logs in enumerate(self._of_sources) if mask >> bit & 1]
        known = [logs for logs in named if logs is not None]
        best: Sequence[float] = [0.0] * (DEEPEST + 1)
        if known and len(known) == len(named):
            best = known[0] if len(known) == 1 else list(map(max, *known))
        highest = self.highest
        relative = [log - highest for log in best]
        relative += relative[-1:] * (self.deepest - DEEPEST)
        self[mask] = relative
        return relative


class _SourceCorrection:
    """Promised and accepted tokens of one source by depth."""

    def __init__(self) -> None:
        self._promised = [0.0] * (DEEPEST + 1)
        self._accepted = [0.0] * (DEEPEST + 1)
        self._logs: list[float] | None = None

    @property
    def logs(self) -> list[float]:
        """Logs of the correction by depth, 0 at depth 0; computed on first use after a count."""
        if self._logs is None:
            self._logs = self._solve()
        return self._logs

    def count(self, nodes: Iterable[tuple[int, float]], accepted: Iterable[int]) -> None:
        """Count a verified tree's nodes, as depths and path probabilities, and its accepted nodes' depths."""
        promised = self._promised = [_FADE * tokens for tokens in self._promised]
        taken = self._accepted = [_FADE * tokens for tokens in self._accepted]
        for depth, probability in nodes:
            promised[depth] += probability
        for depth in accepted:
            taken[depth] += 1
        self._logs = None

    def evidence(self) -> SourceEvidence:
        """Counts by depth."""
        return SourceEvidence(tuple(self._promised[1:]), tuple(self._accepted[1:]))

    def restore(self, evidence: SourceEvidence) -> None:
        """Start from other counts."""
        share = min(1.0, RESTORED_TOKENS / max(1.0, *evidence.promised))
        self._promised[1:] = [share * count for count in evidence.promised]
        self._accepted[1:] = [share * count for count in evidence.accepted]
        self._logs = None

    def _solve(self) -> list[float]:
        logs = [0.0]
        # Avoids logs of ratios that are not the least so far.
        least = math.inf
        lowest = _HIGHEST
        for promised, taken in zip(self._promised[1:], self._accepted[1:], strict=True):
            ratio = (taken + _PRIOR_TOKENS) / (promised + _PRIOR_TOKENS)
            if ratio < least:
                least = ratio
                lowest = min(lowest, max(_LOWEST, math.log(ratio)))
            logs.append(lowest)
        return logs


class UsualGains:
    """Running means of gains relative to a usual draft: of all rounds, of greedy requests and of others."""

    def __init__(self) -> None:
        self.mean = 1.0
        self._greedy = self._sampled = 1.0

    def of_class(self, is_greedy: bool) -> float:
        """Expected relative gain of a class of requests."""
        return self._greedy if is_greedy else self._sampled

    def restore(self, mean: float, greedy: float, sampled: float) -> None:
        """Start from other means."""
        self.mean, self._greedy, self._sampled = mean, greedy, sampled

    def add(self, relative_gain: float, is_greedy: bool) -> None:
        """Record a round that asked for drafts."""
        if is_greedy:
            self._greedy += _RATE * (relative_gain - self._greedy)
        else:
            self._sampled += _RATE * (relative_gain - self._sampled)
        self.mean += _RATE * (relative_gain - self.mean)
