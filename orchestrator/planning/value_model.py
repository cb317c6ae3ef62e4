"""What nodes are worth: the drafters' own probabilities, corrected by what the target accepted."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sequence

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
_NUM_BINS = 40
_BIN_VALUES = tuple(math.exp(-(index + 0.5) * _BIN_WIDTH) for index in range(_NUM_BINS))
# Trees that the count of nodes at hand remembers about as many of.
_TREES_AT_HAND = 64


class ValueModel:
    """Corrects path probabilities by source and depth, and counts the nodes of the trees at hand by their worth.

    The correction of a depth is the ratio of the tokens accepted there to those that the probabilities promised. It
    never rises with depth, so that no node is worth more than its parent.
    """

    def __init__(self) -> None:
        self._corrections: dict[str, _SourceCorrection] = {}
        self._counts = [0.0] * _NUM_BINS
        self._num_trees = 0.0
        # What corrections come to for names, mask and depth of a tree, until the next one is learned from.
        self._known: dict[tuple[tuple[str, ...], int, int], list[float]] = {}

    @property
    def has_seen_trees(self) -> bool:
        """Whether there is anything to expect of drafts."""
        return self._num_trees > 0

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
            if index < _NUM_BINS:
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
        lowest = _HIGHEST
        for depth in range(1, DEEPEST + 1):
            ratio = (taken[depth] + _PRIOR_TOKENS) / (promised[depth] + _PRIOR_TOKENS)
            lowest = min(lowest, max(_LOWEST, math.log(ratio)))
            self.logs[depth] = lowest
