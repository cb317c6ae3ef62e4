"""What nodes are worth: the drafters' own probabilities, corrected by what the target accepted."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from coppice.tree import ROOT, TokenTree

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
# The mask of every source there may be: that of all nodes of a tree without masks.
_EVERY_SOURCE = -1


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
        self._counts = [0.0] * NUM_BINS
        self._num_trees = 0.0

    def learn(self, tree: TokenTree, token_ids: Sequence[int]) -> float:
        """Compare a verified tree with the tokens accepted of it; returns how many had been promised, as corrected."""
        accepted: list[int] = []
        parent = ROOT
        for token in token_ids:
            parent = tree.children.get((parent, token), ROOT)
            if parent == ROOT:
                break
            accepted.append(parent)
        promised = sum(map(math.exp, [value if value < 0 else 0.0 for value in self.path_logs(tree)]))
        probabilities = list(map(math.exp, tree.path_log_probs))
        depths = tree.depths if tree.depth <= DEEPEST else [min(depth, DEEPEST) for depth in tree.depths]
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
            relative = corrections[_EVERY_SOURCE]
            return [
                path + highest + relative[depth] for path, depth in zip(tree.path_log_probs, tree.depths, strict=True)
            ]
        return [
            path + highest + corrections[mask][depth]
            for path, depth, mask in zip(tree.path_log_probs, tree.depths, tree.sources, strict=True)
        ]

    def worth(self, tree: TokenTree, least_log: float) -> Sequence[int] | None:
        """The nodes whose worth has at least this logarithm, parents included, in order; None when all of them have.

        Every draft comes by here: nodes are looked at only as far as they have to be.
        """
        corrections, parents, log_probs = self._corrections_of(tree), tree.parents, tree.log_probs
        # What the logarithm of a child's own probability has to be at least, if its correction is the highest. Below a
        # node that is cut nothing is enough. The root's own place comes last, where its index of -1 finds it.
        least = [math.inf] * len(parents)
        least.append(least_log - corrections.highest)
        num_first = 0
        masks = tree.sources or itertools.repeat(_EVERY_SOURCE)
        for parent, log_prob, depth, mask in zip(parents, log_probs, tree.depths, masks, strict=False):
            left = least[parent] - log_prob
            if left > corrections[mask][depth]:
                break
            least[num_first] = left
            num_first += 1
        else:
            return None
        # Drafters name likely nodes first, more or less, so that there are few further ones.
        kept: list[int] | None = None
        node = num_first
        for parent, log_prob in zip(parents[num_first:], log_probs[num_first:], strict=True):
            if log_prob >= least[parent]:
                left = least[parent] - log_prob
                if left <= corrections[tree.sources[node] if tree.sources else _EVERY_SOURCE][tree.depths[node]]:
                    least[node] = left
                    if kept is None:
                        kept = list(range(num_first))
                    kept.append(node)
            node += 1
        return range(num_first) if kept is None else kept

    def note(self, tree: TokenTree) -> None:
        """Count a tree's nodes among those at hand."""
        fade = 1 - 1 / _TREES_AT_HAND
        counts = self._counts = [fade * count for count in self._counts]
        self._num_trees = fade * self._num_trees + 1
        for value in self.path_logs(tree):
            if value > _LOWEST_BIN:
                counts[int(value * -_BINS_PER_UNIT) if value < 0 else 0] += 1

    def nodes_at_hand(self) -> list[tuple[float, float]]:
        """What nodes are worth and how many of them a tree has on average, from the likeliest down."""
        if not self._num_trees:
            return []
        return [(value, count / self._num_trees) for value, count in zip(_BIN_VALUES, self._counts, strict=True)]

    def _corrections_of(self, tree: TokenTree) -> _TreeCorrections:
        names = tree.source_names
        known = self._known.get(names)
        if known is None or known.depth < tree.depth:
            logs = [self._corrections[name].logs if name in self._corrections else None for name in names]
            known = self._known[names] = _TreeCorrections(logs, max(DEEPEST, tree.depth))
        return known


class _TreeCorrections(dict[int, list[float]]):
    """By the mask of a node's sources and its depth, what corrections come to: the best of those of its sources.

    They are relative to the highest of all, which is that of the first depth.
    """

    def __init__(self, of_sources: Sequence[Sequence[float] | None], depth: int) -> None:
        """`of_sources` are the logarithms by depth for each bit of a mask, None for sources not known yet."""
        super().__init__()
        self._of_sources = of_sources
        self.depth = depth
        self.highest = max((0.0 if logs is None else logs[1] for logs in of_sources), default=0.0)

    def __missing__(self, mask: int) -> list[float]:
        named = [logs for bit, logs in enumerate(self._of_sources) if mask >> bit & 1]
        known = [logs for logs in named if logs is not None]
        best = [0.0] * (DEEPEST + 1)
        if known and len(known) == len(named):
            best = [max(logs) for logs in zip(*known, strict=True)]
        best += best[-1:] * (self.depth - DEEPEST)
        self[mask] = relative = [log - self.highest for log in best]
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
        lowest = _HIGHEST
        for promised, taken in zip(self._promised[1:], self._accepted[1:], strict=True):
            lowest = min(lowest, max(_LOWEST, math.log((taken + _PRIOR_TOKENS) / (promised + _PRIOR_TOKENS))))
            logs.append(lowest)
        return logs
