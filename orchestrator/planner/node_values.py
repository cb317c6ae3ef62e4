"""Probabilities of nodes: drafters' own, with an exponent learned from what the target said."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Sequence

from coppice.core.tree import ROOT, TokenTree

# Step of an exponent's logarithm per wrongly promised or denied guess, and of the mean of guessed tokens per tree: a
# hundred decide.
STEP = 0.03
# Bound of an exponent's logarithm either way: a drafter that is sure of everything loses its rows, but can recover.
MOST = 2.0
# Trees of the same sources count as ordered, likeliest node first, after so many that were, up to rounding.
FEWEST_IN_ORDER, _ROUNDING = 16, 1e-3
# Mask of all sources: that of every node of a tree without masks.
_EVERY_SOURCE = -1
# Indices of nodes, for zips bounded by the tree.
_NUMBERS = range(sys.maxsize)


class NodeValues:
    """P(node is accepted) = product along its path of p ** exponent, with one exponent per drafter.

    A drafter that promises too much has an exponent above 1, and deep nodes lose most. A node's value is at most its
    parent's whatever the exponents are, so the nodes above a price form a tree. Robbins-Monro: where the target said a
    token, the exponents of those that had guessed there move by the promised minus the actual hits.
    """

    def __init__(self) -> None:
        self._logs: dict[str, float] = {}
        # By source names of a tree: exponents by mask, and ordered trees in a row.
        self._exponents: dict[tuple[str, ...], dict[int, float]] = {}
        self._in_order: dict[tuple[str, ...], int] = {}
        self._left = [0.0]
        # Tokens that a source guesses in a row, by its name.
        self.guessed: dict[str, float] = {}

    def exponent(self, names: tuple[str, ...], mask: int = _EVERY_SOURCE) -> float:
        """The least exponent of a node's sources: the most confident one of them may be right."""
        known = self._exponents.setdefault(names, {})
        value = known.get(mask)
        if value is None:
            logs = [self._logs.get(name, 0.0) for bit, name in enumerate(names) if mask >> bit & 1]
            value = known[mask] = math.exp(min(logs, default=0.0))
        return value

    def worth(self, tree: TokenTree, least_log: float) -> TokenTree:
        """Nodes whose value has at least this logarithm. On the path of every draft."""
        names, log_probs = tree.source_names, tree.log_probs
        if tree.sources:
            known = self._exponents.get(names)
            if known is None or not known.keys() >= set(tree.sources):
                known = {mask: self.exponent(names, mask) for mask in set(tree.sources)}
                self._exponents[names].update(known)
            log_probs = tuple([known[mask] * value for mask, value in zip(tree.sources, log_probs, strict=True)])
        else:
            least_log /= self.exponent(names)
        # What is left of the least value after each node; the root's entry is last, at index -1. Only entries written
        # for this tree are read.
        left = self._left
        if len(left) <= len(log_probs):
            left = self._left = [0.0] * (2 * len(log_probs))
        left[-1] = -least_log
        # `strict` would take longer than the loop.
        nodes = zip(_NUMBERS, tree.parents, log_probs)  # noqa: B905
        for node, parent, log_prob in nodes:
            left[node] = rest = left[parent] + log_prob
            if rest < 0:
                break
        else:
            return tree
        if self._in_order.get(names, 0) >= FEWEST_IN_ORDER:
            return tree.first(node)
        kept = list(range(node))
        for later, parent, log_prob in nodes:
            left[later] = rest = left[parent] + log_prob
            if rest >= 0:
                kept.append(later)
        return tree.take(kept) if kept else tree.first(0)

    def learn(self, tree: TokenTree, token_ids: Sequence[int]) -> None:
        """Compare a verified tree with the tokens that were committed."""
        names, paths = tree.source_names, tree.path_log_probs
        rise = max(map(operator.sub, paths[1:], paths), default=0.0)
        self._in_order[names] = self._in_order.get(names, 0) + 1 if rise <= _ROUNDING else 0
        at, on_path, num_guessed = ROOT, _EVERY_SOURCE, [0] * len(names)
        for token in token_ids:
            guesses = [node for node, parent in enumerate(tree.parents) if parent == at]
            for bit, name in enumerate(names):
                own = [node for node in guesses if not tree.sources or tree.sources[node] >> bit & 1]
                if own:
                    log = self._logs.get(name, 0.0)
                    exponent = math.exp(log)
                    excess = 0.0
                    for node in own:
                        excess += math.exp(exponent * tree.log_probs[node]) - (tree.token_ids[node] == token)
                    self._logs[name] = min(MOST, max(-MOST, log + STEP * excess))
            hits = [node for node in guesses if tree.token_ids[node] == token]
            if not hits:
                break
            at = hits[0]
            on_path &= tree.sources[at] if tree.sources else _EVERY_SOURCE
            num_guessed = [count + (on_path >> bit & 1) for bit, count in enumerate(num_guessed)]
        for name, count in zip(names, num_guessed, strict=True):
            usual = self.guessed.setdefault(name, float(count))
            self.guessed[name] = usual + STEP * (count - usual)
        self._exponents.clear()
