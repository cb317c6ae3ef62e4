"""The guesses of one round as they grow into a tree, and what came of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from coppice.core.tree import EMPTY_TREE, ROOT, TokenTree
from orchestrator.prefix_cache.estimates import MOST, DraftersWord, HitRatePrior, HitRates, kind_of

SOURCE = "cache"
# Guesses for one place; one more would hardly ever be right.
_MOST_SIBLINGS = 3
# A guess whose node is not in the tree, since it is not likely enough.
_NO_NODE = -2


class TokenCandidate(NamedTuple):
    """Tokens that may come next, after `length` tokens that matched."""

    token_ids: Sequence[int]
    length: int
    remembered: bool


class _Guess(NamedTuple):
    token: int
    # None for what drafters had proposed already: that is not the cache's guess.
    kind: int | None
    node: int


class Guesses:
    """A tree of guesses with what drafters have proposed, best candidates first.

    A guess enters the tree when the probability of its whole path is at least `min_probability`. One that does not is
    remembered, so that rates of guesses that are never proposed are learned, too.
    """

    def __init__(
        self, rates: HitRates, prior: HitRatePrior, sampled: bool, drafted: TokenTree | None, min_probability: float
    ) -> None:
        self._rates = rates
        self._factor = prior.factor
        self._prior = prior
        self._sampled = sampled
        self._drafted = drafted
        # Parents of drafted nodes: what drafters had something to say after.
        self._answered = frozenset(drafted.parents) if drafted is not None else frozenset()
        self._min_probability = min_probability
        self._guesses: dict[int, list[_Guess]] = {}
        self._token_ids: list[int] = []
        self._parents: list[int] = []
        self._log_probs: list[float] = []
        # Of each node: its path's probability, and the drafted node that it is, if it is one.
        self._paths: list[float] = []
        self._drafted_nodes: list[int | None] = []
        # Accepted tokens that the guesses in the tree add on average to what drafters have.
        self.gain = 0.0

    def add(self, candidate: TokenCandidate, max_depth: int, max_nodes: int) -> None:
        """Follow a candidate as far as it is likely enough, down to a depth and up to a number of nodes in all."""
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
        """The tree; empty when it has nothing that the drafters have not, or gains less than `min_gain`."""
        if not self.gain or self.gain < min_gain:
            return EMPTY_TREE
        return TokenTree(tuple(self._token_ids), tuple(self._parents), tuple(self._log_probs), (SOURCE,))

    def learn(self, token_ids: Sequence[int]) -> None:
        """Count the guesses whose parents were right, now that `token_ids` are committed."""
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
        rate = min(MOST, self._rates.rate(kind) * self._factor)
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
