"""What nodes are worth: the drafters' own probabilities, corrected by what the target accepted."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from coppice.tree import ROOT, TokenTree

# Nodes deeper than this share the correction of this depth.
DEEPEST = 16
# What is left of a tree's weight in a correction with each further one, and the tokens that speak for no correction.
_FADE = 1 - 1 / 256
_PRIOR_TOKENS = 4.0
# Corrections are kept between these, as logarithms: a drafter that lies may lose all its rows, and never gain many.
_LOWEST, _HIGHEST = -3.0, 0.7
# Path probabilities are counted in bins of this width on the logarithmic scale, down to 2 %.
_BIN_WIDTH = 0.1
NUM_BINS = 40
_BIN_VALUES = tuple(math.exp(-(index + 0.5) * _BIN_WIDTH) for index in range(NUM_BINS))
# Trees that the count of nodes at hand remembers about as many of.
_TREES_AT_HAND = 64
# What was restored counts for at most so many promised tokens of a source, and trees.
RESTORED_TOKENS = 32.0
RESTORED_TREES = 8.0


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
        # What corrections come to for names, mask and depth of a tree, until the next one is learned from.
        self._known: dict[tuple[tuple[str, ...], int, int], list[float]] = {}

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
        accepted: set[int] = set()
        parent = ROOT
        for token in token_ids:
            parent = tree.children.get((parent, token), ROOT)
            if parent == ROOT:
                break
            accepted.add(parent)
        promised = sum([math.exp(min(0.0, value)) for value in self.path_logs(tree)])
        probabilities = list(map(math.exp, tree.path_log_probs))
        for bit, name in enumerate(tree.source_names):
            correction = self._corrections.get(name)
            if correction is None:
                correction = self._corrections[name] = _SourceCorrection()
            nodes: Sequence[int] = range(len(tree))
            if tree.sources:
                nodes = [node for node, mask in enumerate(tree.sources) if mask >> bit & 1]
            correction.count(tree.depths, probabilities, nodes, accepted)
        self._known.clear()
        return promised

    def path_logs(self, tree: TokenTree) -> list[float]:
        """Logarithms of what the nodes are worth, in their order."""
        if not tree.sources:
            logs = self._logs(tree, 0)
            return [path + logs[depth] for path, depth in zip(tree.path_log_probs, tree.depths, strict=True)]
        by_mask = {mask: self._logs(tree, mask) for mask in set(tree.sources)}
        return [
            path + by_mask[mask][depth]
            for path, depth, mask in zip(tree.path_log_probs, tree.depths, tree.sources, strict=True)
        ]

    def worth(self, tree: TokenTree, least_log: float) -> Sequence[int] | None:
        """The nodes whose worth has at least this logarithm, parents included; None when all of them have."""
        paths = tree.path_log_probs
        if not tree.sources:
            logs = self._logs(tree, 0)
            # Corrections fall with depth, so that the last one is the lowest; so, mostly, is the last node's path.
            if paths[-1] + logs[-1] >= least_log and min(paths) + logs[-1] >= least_log:
                return None
            floors = [least_log - log for log in logs]
            kept = [node for node, depth in enumerate(tree.depths) if paths[node] >= floors[depth]]
        else:
            kept = [node for node, value in enumerate(self.path_logs(tree)) if value >= least_log]
        return None if len(kept) == len(tree) else kept

    def note(self, tree: TokenTree) -> None:
        """Count a tree's nodes among those at hand."""
        fade = 1 - 1 / _TREES_AT_HAND
        self._counts = [fade * count for count in self._counts]
        self._num_trees = fade * self._num_trees + 1
        for value in self.path_logs(tree):
            index = int(-value / _BIN_WIDTH) if value < 0 else 0
            if index < NUM_BINS:
                self._counts[index] += 1

    def nodes_at_hand(self) -> list[tuple[float, float]]:
        """What nodes are worth and how many of them a tree has on average, from the likeliest down."""
        if not self._num_trees:
            return []
        return [(value, count / self._num_trees) for value, count in zip(_BIN_VALUES, self._counts, strict=True)]

    def _logs(self, tree: TokenTree, mask: int) -> list[float]:
        """Corrections by depth of a tree's nodes with this mask: the best of those of the sources that it names."""
        key = (tree.source_names, mask, tree.depth)
        logs = self._known.get(key)
        if logs is None:
            names = [name for bit, name in enumerate(tree.source_names) if not tree.sources or mask >> bit & 1]
            logs = self._known[key] = self._best(names, tree.depth)
        return logs

    def _best(self, names: Sequence[str], depth: int) -> list[float]:
        known = [self._corrections[name].logs for name in names if name in self._corrections]
        if not known or len(known) < len(names):
            return [0.0] * (depth + 1)
        best = known[0] if len(known) == 1 else [max(values) for values in zip(*known, strict=True)]
        return best[: depth + 1] if depth <= DEEPEST else best + [best[-1]] * (depth - DEEPEST)


class _SourceCorrection:
    """Tokens that one source promised, and those that were accepted, by depth."""

    def __init__(self) -> None:
        self._promised = [0.0] * (DEEPEST + 1)
        self._accepted = [0.0] * (DEEPEST + 1)
        self.logs = [0.0] * (DEEPEST + 1)

    def count(
        self, depths: Sequence[int], probabilities: Sequence[float], nodes: Iterable[int], accepted: Container[int]
    ) -> None:
        """Count these nodes of a verified tree, of which depths and path probabilities are given."""
        promised = self._promised = [_FADE * tokens for tokens in self._promised]
        taken = self._accepted = [_FADE * tokens for tokens in self._accepted]
        for node in nodes:
            depth = min(depths[node], DEEPEST)
            promised[depth] += probabilities[node]
            taken[depth] += node in accepted
        self._solve()

    def evidence(self) -> SourceEvidence:
        """What was counted."""
        return SourceEvidence(tuple(self._promised[1:]), tuple(self._accepted[1:]))

    def restore(self, evidence: SourceEvidence) -> None:
        """Begin with what was counted elsewhere."""
        share = min(1.0, RESTORED_TOKENS / max(1.0, *evidence.promised))
        self._promised[1:] = [share * count for count in evidence.promised]
        self._accepted[1:] = [share * count for count in evidence.accepted]
        self._solve()

    def _solve(self) -> None:
        promised, taken = self._promised, self._accepted
        lowest = _HIGHEST
        for depth in range(1, DEEPEST + 1):
            ratio = (taken[depth] + _PRIOR_TOKENS) / (promised[depth] + _PRIOR_TOKENS)
            lowest = min(lowest, max(_LOWEST, math.log(ratio)))
            self.logs[depth] = lowest
