"""Guesses of one round: their tree, and what was learned from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from coppice.core.tree import EMPTY_TREE, ROOT, TokenTree
from coppice.search.counted_rates import MOST_CERTAIN
from orchestrator.prefix_cache.estimates import DraftersWord, HitRatePrior, HitRates, kind_of

SOURCE = "cache"
# Siblings per parent; further ones would hardly ever be right.
_MOST_SIBLINGS = 3
# Node of a guess that is too unlikely for the tree.
_NO_NODE = -2


class TokenCandidate(NamedTuple):
    """Candidate continuation after `length` matching tokens."""

    token_ids: Sequence[int]
    length: int
    remembered: bool


class _Guess(NamedTuple):
    token: int
    # None for a node that drafters proposed: not the cache's guess.
    kind: int | None
    node: int


class Guesses:
    """Tree of guesses merged with the drafters' tree, best candidates first.

    A guess enters the tree if its path probability is at least `min_probability`. Others are kept aside, to learn the
    rates of guesses that are not proposed.
    """

    def __init__(
        self, rates: HitRates, prior: HitRatePrior, sampled: bool, drafted: TokenTree | None, min_probability: float
    ) -> None:
        self._rates = rates
        self._factor = prior.factor
        self._prior = prior
        self._sampled = sampled
        self._drafted = drafted
        # Drafted nodes with children.
        self._answered = frozenset(drafted.parents) if drafted is not None else frozenset()
        self._min_probability = min_probability
        self._guesses: dict[int, list[_Guess]] = {}
        self._token_ids: list[int] = []
        self._parents: list[int] = []
        self._log_probs: list[float] = []
        # By node: path probability, and the same node of the drafters' tree, if any.
        self._paths: list[float] = []
        self._drafted_nodes: list[int | None] = []
        # Expected accepted tokens that the guesses add to the drafters' tree.
        self.gain = 0.0

    def add(self, candidate: TokenCandidate, max_depth: int, max_nodes: int) -> None:
        """Add a candidate's tokens while they are likely enough, within the depth and the tree's total nodes."""
        at = ROOT
        for depth, token in enumerate(candidate.token_ids[:max_depth], start=1):
            siblings = self._guesses.setdefault(at, [])
            known = next((guess for guess in siblings if guess.token == token), None)
            if known is None:
                if len(siblings) >= _MOST_SIBLINGS or len(self._token_ids) >= max_nodes:
                    return
                known = self._guess(at, token, depth, len(siblings), candidate)
                siblings.append(known)
            if known.node == _NO_NODE:
                return
            at = known.node

    def tree(self, min_gain: float = 0.0) -> TokenTree:
        """The tree; empty if it adds nothing to the drafters' tree, or less than `min_gain`."""
        if not self.gain or self.gain < min_gain:
            return EMPTY_TREE
        return TokenTree(tuple(self._token_ids), tuple(self._parents), tuple(self._log_probs), (SOURCE,))

    def learn(self, token_ids: Sequence[int]) -> None:
        """Count the guesses whose parents were right, given the committed tokens."""
        at = ROOT
        for token in token_ids:
            follows = _NO_NODE
            for guess in self._guesses.get(at, ()):
                hit = guess.token == token
                if hit:
                    follows = guess.node
                if guess.kind is not None:
                    self._prior.hits += hit
                    self._prior.expected += self._rates.rate(guess.kind)
                    self._rates.count(guess.kind, hit)
            if follows == _NO_NODE:
                return
            at = follows

    def _guess(self, parent: int, token: int, depth: int, rank: int, candidate: TokenCandidate) -> _Guess:
        path = self._paths[parent] if parent != ROOT else 1.0
        drafted_parent = self._drafted_node(parent)
        if self._drafted is not None and drafted_parent is not None:
            drafted = self._drafted.children.get((drafted_parent, token))
            if drafted is not None:
                log_prob = self._drafted.log_probs[drafted]
                return _Guess(token, None, self._node(token, parent, log_prob, path * math.exp(log_prob), drafted))
        kind = kind_of(self._sampled, self._place(drafted_parent), candidate.remembered, candidate.length, depth, rank)
        rate = min(MOST_CERTAIN, self._rates.rate(kind) * self._factor)
        if path * rate < self._min_probability:
            return _Guess(token, kind, _NO_NODE)
        self.gain += path * rate
        return _Guess(token, kind, self._node(token, parent, math.log(rate), path * rate, None))

    def _node(self, token: int, parent: int, log_prob: float, path: float, drafted: int | None) -> int:
        self._token_ids.append(token)
        self._parents.append(parent)
        self._log_probs.append(log_prob)
        self._paths.append(path)
        self._drafted_nodes.append(drafted)
        return len(self._token_ids) - 1

    def _drafted_node(self, node: int) -> int | None:
        return ROOT if node == ROOT else self._drafted_nodes[node]

    def _place(self, drafted_parent: int | None) -> DraftersWord:
        if self._drafted is None:
            return DraftersWord.ALONE
        return DraftersWord.AGAINST if drafted_parent in self._answered else DraftersWord.BEYOND
