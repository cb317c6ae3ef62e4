"""Values of nodes: the drafters' own probabilities, corrected by what the target accepted; usual gains of drafts."""

from __future__ import annotations

import itertools
import math
import operator
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from coppice.core.tree import ROOT, TokenTree

# Nodes deeper than this share the correction of this depth.
DEEPEST = 16
# What is left of a tree's weight in a correction with each further one, and the tokens that speak for no correction.
_FADE = 1 - 1 / 256
_PRIOR_TOKENS = 4.0
# Corrections are kept between these, as logarithms: a drafter that lies may lose all its rows, and never gain many.
_LOWEST, _HIGHEST = -3.0, 0.7
# Path probabilities are counted in bins on the logarithmic scale, so many per unit, down to 2 %.
_BINS_PER_UNIT = 10
NUM_BINS = 40
_LOWEST_BIN = -NUM_BINS / _BINS_PER_UNIT
_BIN_VALUES = tuple(math.exp(-(index + 0.5) / _BINS_PER_UNIT) for index in range(NUM_BINS))
# Trees that the count of nodes at hand remembers about as many of.
_TREES_AT_HAND = 64
# What was restored counts for at most so many promised tokens of a source, and trees.
RESTORED_TOKENS = 32.0
RESTORED_TREES = 8.0
# Trees of the same sources are taken to name their nodes from the likeliest down when so many of them in a row that
# were looked at did, but for differences of logarithms that make none here.
FEWEST_IN_ORDER = 16
_NO_DIFFERENCE = 1e-3
# The mask of every source there may be: that of all nodes of a tree without masks.
_EVERY_SOURCE = -1
# Numbers of nodes, for whoever stops where the tree does.
_NUMBERS = range(sys.maxsize)
# Weight of a round in a running mean.
_RATE = 0.05


@dataclass(frozen=True)
class SourceEvidence:
    """Tokens that a source promised, and those accepted, at each depth from 1 to `DEEPEST`.

    Raises:
        ValueError: other depths, or no counts.
    """

    promised: tuple[float, ...]
    accepted: tuple[float, ...]

    def __post_init__(self) -> None:
        _check_counts(self.promised, DEEPEST)
        _check_counts(self.accepted, DEEPEST)


@dataclass(frozen=True)
class TreeEvidence:
    """What is known of trees: how many there were, nodes of a tree by worth, and every source's promises.

    Raises:
        ValueError: other bins, or no counts.
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
    """Corrects path probabilities by source and depth, and counts the nodes of the trees at hand by their worth.

    The correction of a depth is the ratio of the tokens accepted there to those that the probabilities promised. It
    never rises with depth, so that no node is worth more than its parent.
    """

    def __init__(self) -> None:
        self._corrections: dict[str, _SourceCorrection] = {}
        self._counts = [0.0] * NUM_BINS
        self._num_trees = 0.0
        # What corrections come to for trees of these sources, until the next one is learned from.
        self._known: dict[tuple[str, ...], _TreeCorrections] = {}
        # Of trees of these sources, how many in a row had their nodes in order.
        self._num_in_order: dict[tuple[str, ...], int] = {}

    @property
    def has_seen_trees(self) -> bool:
        """Whether there is anything to expect of drafts."""
        return self._num_trees > 0

    def evidence(self) -> TreeEvidence:
        """What was seen of trees."""
        return TreeEvidence(
            num_trees=self._num_trees,
            nodes=tuple(count / (self._num_trees or 1.0) for count in self._counts),
            sources={name: correction.evidence() for name, correction in self._corrections.items()},
        )

    def restore(self, evidence: TreeEvidence) -> None:
        """Begin with what was seen elsewhere, which a few trees of this place's own outweigh."""
        self._num_trees = min(evidence.num_trees, RESTORED_TREES)
        self._counts = [self._num_trees * count for count in evidence.nodes]
        for name, source in evidence.sources.items():
            self._corrections[name] = _SourceCorrection()
            self._corrections[name].restore(source)
        self._known.clear()

    def forget(self) -> None:
        """Begin anew."""
        self._corrections.clear()
        self._known.clear()
        self._num_in_order.clear()
        self._counts = [0.0] * NUM_BINS
        self._num_trees = 0.0

    def learn(self, tree: TokenTree, token_ids: Sequence[int]) -> float:
        """Compare a verified tree with the tokens accepted of it; returns how many had been promised, as corrected."""
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
        """Logarithms of what the nodes are worth, in their order."""
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
        """The nodes whose worth has at least this logarithm, parents included, in order; None when all of them have.

        Their number where these are the first ones. Every draft comes by here: nodes are looked at only as far as they
        have to be.
        """
        corrections = self._known.get(tree.source_names)
        if corrections is None or corrections.deepest < len(tree.token_ids):
            corrections = self._corrections_of(tree)
        # What the logarithm of a child's own probability has to be at least, if its correction is the highest, and the
        # child's depth. Only what was written for this tree is read. The root's own place comes last, where its index
        # of -1 finds it.
        least, depths = corrections.least, corrections.child_depths
        least[-1] = least_log - corrections.highest
        if tree.sources:
            return _among_sources(tree, corrections)
        relative = corrections.of_every_source
        # Strictness would take longer than the walk.
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
            # Not even with the highest correction would this node do, and further ones are less likely.
            return node
        return _further(nodes, corrections, node)

    def note(self, tree: TokenTree) -> None:
        """Count a tree's nodes among those at hand, and see whether they are in order."""
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
        """Count a tree of these sources, by its path log-probabilities."""
        is_in_order = sorted(paths, reverse=True) == list(paths)
        if not is_in_order:
            # From each node to the next.
            is_in_order = max(map(operator.sub, paths[1:], paths)) <= _NO_DIFFERENCE
        before = self._num_in_order.get(names, 0)
        after = self._num_in_order[names] = before + 1 if is_in_order else 0
        if (before < FEWEST_IN_ORDER) != (after < FEWEST_IN_ORDER):
            self._known.pop(names, None)

    def nodes_at_hand(self) -> list[tuple[float, float]]:
        """What nodes are worth and how many of them a tree has on average, from the likeliest down."""
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
    """The nodes that these tokens lead to. Parents come before children: one look at each node is enough."""
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
    """The first nodes, and of those after the next one what is worth as much; below a node that is cut nothing is.

    `nodes` are the places of nodes, their parents and log-probabilities.
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
    """What is worth at least as much as the root's place says, of a tree whose nodes have sources of their own."""
    least, depths, is_in_order = corrections.least, corrections.child_depths, corrections.is_in_order
    kept: list[int] = []
    # Strictness would take longer than the walk.
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
    """By the mask of a node's sources and its depth, what corrections come to: the best of those of its sources.

    They are relative to the highest of all, which is that of the first depth, and reach to a depth of `deepest`.
    `of_every_source` are those of nodes that all sources proposed, as in trees without masks.
    `is_in_order` says whether these trees name their nodes from the likeliest down. `least` and `child_depths` are
    scratch space for trees of up to `deepest` nodes, and the root.
    """

    __slots__ = ("_of_sources", "child_depths", "deepest", "highest", "is_in_order", "least", "of_every_source")

    def __init__(self, of_sources: Sequence[Sequence[float] | None], deepest: int, is_in_order: bool) -> None:
        """`of_sources` are the logarithms by depth for each bit of a mask, None for sources not known yet."""
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
    """Tokens that one source promised, and those that were accepted, by depth."""

    def __init__(self) -> None:
        self._promised = [0.0] * (DEEPEST + 1)
        self._accepted = [0.0] * (DEEPEST + 1)
        self._logs: list[float] | None = None

    @property
    def logs(self) -> list[float]:
        """Logarithms of the correction by depth, with nothing at 0: worked out when they are wanted after a count."""
        if self._logs is None:
            self._logs = self._solve()
        return self._logs

    def count(self, nodes: Iterable[tuple[int, float]], accepted: Iterable[int]) -> None:
        """Count nodes of a verified tree, of which depths and path probabilities are given; of accepted ones depths."""
        promised = self._promised = [_FADE * tokens for tokens in self._promised]
        taken = self._accepted = [_FADE * tokens for tokens in self._accepted]
        for depth, probability in nodes:
            promised[depth] += probability
        for depth in accepted:
            taken[depth] += 1
        self._logs = None

    def evidence(self) -> SourceEvidence:
        """What was counted."""
        return SourceEvidence(tuple(self._promised[1:]), tuple(self._accepted[1:]))

    def restore(self, evidence: SourceEvidence) -> None:
        """Begin with what was counted elsewhere."""
        share = min(1.0, RESTORED_TOKENS / max(1.0, *evidence.promised))
        self._promised[1:] = [share * count for count in evidence.promised]
        self._accepted[1:] = [share * count for count in evidence.accepted]
        self._logs = None

    def _solve(self) -> list[float]:
        logs = [0.0]
        # The least ratio so far: few depths have one that is less.
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
