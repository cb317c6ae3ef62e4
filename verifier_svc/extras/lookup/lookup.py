"""Prompt lookup decoding (Saxena, 2023) as trees: what followed the last tokens earlier in prompt and output.

The verifier makes these drafts itself when it has chosen a token, so that no round waits for one and none comes late.
Earlier occurrences of the last tokens vote for the next ones with weights that grow with the length of the match. What
a vote is worth is counted: the share of right ones by length of the match, share of the votes, and depth. Nothing of
this decides on a token.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from coppice.core.tree import EMPTY_TREE, ROOT, TokenTree
from coppice.search.counted_rates import MOST_CERTAIN, CountedRates
from verifier_svc.engine.pass_cost import PassCost

SOURCE = "prompt-lookup"
# Occurrences of the last token that are looked at, the latest first, and those with the longest matches that vote.
_MOST_SCANNED, _MOST_VOTES = 64, 24
# Longer matches are not told apart.
_MAX_MATCH = 16
# A vote counts three times as much for each further token that matched, up to eight.
_WEIGHTS = tuple(3.0 ** min(length, 8) for length in range(_MAX_MATCH + 1))
_MAX_DEPTH = 16
# Kinds of guesses: least lengths of a match, least shares of the votes, and least depths.
_LENGTHS, _SHARES, _DEPTHS = (1, 2, 3, 4, 6, 9, 16), (0.0, 0.2, 0.4, 0.6, 0.8, 0.95), (0, 1, 3)
# Hit rates before anything was counted, by length and by share.
_PRIOR_BY_LENGTH = (0.08, 0.2, 0.4, 0.5, 0.65, 0.75, 0.85)
_PRIOR_BY_SHARE = (0.15, 0.3, 0.5, 0.7, 0.85, 1.0)
# Rows that take as long as a pass does by itself, until that is known.
_FIRST_OWN_ROWS = 16.0
# A node has to promise so many times what its row costs: both are estimates.
_MARGIN = 1.25
# With more sequences in a pass, or a higher price, hardly a node is likely enough: nothing is looked for.
_MOST_SEQUENCES = 4
_HIGHEST_PRICE = 0.8
_LEAST_PROBABILITY = 0.03
# Weight of what is true of all requests in a request's own correction, in guesses; bounds of that correction.
_COMMON_WEIGHT = 4.0
_LEAST_FACTOR, _MOST_FACTOR = 0.2, 1.5
# Weight of a round in the mean number of its tokens.
_MEAN_RATE = 0.1


class LookupRates(CountedRates):
    """Hit rates of guesses of all sequences of an engine."""

    def __init__(self) -> None:
        # Right tokens before it make a guess as good as a longer match does.
        super().__init__(
            [
                (1 - (1 - by_length * by_share) * 0.7 ** min(least_depth, 2)) * (0.5 if sampled else 1.0)
                for sampled in (False, True)
                for by_length in _PRIOR_BY_LENGTH
                for by_share in _PRIOR_BY_SHARE
                for least_depth in _DEPTHS
            ]
        )


@dataclass(frozen=True, slots=True)
class LookupSettings:
    """Prompt lookup of a target: most nodes of a tree, and what passes cost and guesses are worth, which is learned."""

    max_nodes: int
    cost: PassCost = field(default_factory=PassCost)
    rates: LookupRates = field(default_factory=LookupRates)

    def row_price(self, num_sequences: int, tokens_per_round: float) -> float:
        """Tokens that a further row has to bring where so many sequences share a pass.

        A row makes the pass longer, and all of them commit so many tokens less in the meantime.
        """
        own_rows = self.cost.own_rows or _FIRST_OWN_ROWS
        return num_sequences * tokens_per_round / (own_rows + num_sequences)


class _Vote(NamedTuple):
    """An earlier occurrence: the position of the token that followed it, and how many tokens match before that."""

    position: int
    length: int


class _LookupGuess:
    """A guess for the place after a node: its kind, and its own node once it has one."""

    __slots__ = ("kind", "node")

    def __init__(self, kind: int) -> None:
        self.kind = kind
        self.node = ROOT


class PromptLookup:
    """Drafts of one sequence from its own tokens, at most `max_nodes` nodes each. Used on the engine's thread."""

    def __init__(self, settings: LookupSettings, max_nodes: int, sampled: bool) -> None:
        self._settings = settings
        self._max_nodes = min(max_nodes, settings.max_nodes)
        self._first_kind = len(_LENGTHS) * len(_SHARES) * len(_DEPTHS) * sampled
        # Positions after each token, and how many tokens have been looked at.
        self._after: dict[int, list[int]] = {}
        self._num_indexed = 0
        # Guesses of the last draft by the node before them.
        self._guesses: dict[int, dict[int, _LookupGuess]] = {}
        self._tokens_per_round = 1.0
        self._hits = self._expected = _COMMON_WEIGHT

    def committed(self, token_ids: Sequence[int]) -> None:
        """Learn from the tokens that a round has committed."""
        self._tokens_per_round += _MEAN_RATE * (len(token_ids) - self._tokens_per_round)
        guesses, self._guesses = self._guesses, {}
        rates, at = self._settings.rates, ROOT
        for token in token_ids:
            for guessed, guess in guesses.get(at, {}).items():
                self._expected += rates.rate(guess.kind)
                self._hits += guessed == token
                rates.count(guess.kind, guessed == token)
            right = guesses.get(at, {}).get(token)
            if right is None or right.node == ROOT:
                return
            at = right.node

    def draft(self, tokens: Sequence[int], num_sequences: int) -> TokenTree:
        """A tree after all committed `tokens`, for a pass that so many sequences share; empty where none pays.

        Args:
            tokens: prompt and output so far; they grow from call to call.
            num_sequences: of the pass.
        """
        price = _MARGIN * self._settings.row_price(num_sequences, self._tokens_per_round)
        if num_sequences > _MOST_SEQUENCES or price > _HIGHEST_PRICE:
            return EMPTY_TREE
        self._index(tokens)
        return self._tree(tokens, max(price, _LEAST_PROBABILITY))

    def _index(self, tokens: Sequence[int]) -> None:
        for position in range(self._num_indexed + 1, len(tokens) + 1):
            self._after.setdefault(tokens[position - 1], []).append(position)
        self._num_indexed = len(tokens)

    def _votes(self, tokens: Sequence[int]) -> list[_Vote]:
        """Earlier occurrences of the last tokens, the longest matches first, and of these the latest."""
        end = len(tokens)
        votes = []
        # The last position is the end itself.
        for position in self._after[tokens[-1]][-2 : -2 - _MOST_SCANNED : -1]:
            length, most = 1, min(position, _MAX_MATCH)
            while length < most and tokens[position - length - 1] == tokens[end - length - 1]:
                length += 1
            votes.append(_Vote(position, length))
        votes.sort(key=lambda vote: -vote.length)
        return votes[:_MOST_VOTES]

    def _tree(self, tokens: Sequence[int], least: float) -> TokenTree:
        """The likeliest guesses, best first, as long as their paths are at least so likely."""
        token_ids: list[int] = []
        parents: list[int] = []
        log_probs: list[float] = []
        rates = self._settings.rates
        factor = min(_MOST_FACTOR, max(_LEAST_FACTOR, self._hits / self._expected))
        numbers = itertools.count()
        # Guesses that may become nodes, the likeliest path first.
        open_guesses: list[tuple[float, int, float, int, int, int, list[_Vote]]] = []

        def expand(node: int, votes: list[_Vote], path: float, depth: int) -> None:
            by_token: dict[int, list[_Vote]] = {}
            for vote in votes:
                if vote.position < len(tokens):
                    by_token.setdefault(tokens[vote.position], []).append(vote)
            weights = {token: sum(_WEIGHTS[vote.length] for vote in some) for token, some in by_token.items()}
            total = sum(weights.values())
            guesses = self._guesses[node] = {}
            for token, some in by_token.items():
                kind = self._kind(max(vote.length for vote in some), weights[token] / total, depth)
                guesses[token] = _LookupGuess(kind)
                rate = min(MOST_CERTAIN, factor * rates.rate(kind))
                if path * rate >= least:
                    heapq.heappush(open_guesses, (-path * rate, next(numbers), rate, token, node, depth, some))

        expand(ROOT, self._votes(tokens), 1.0, 0)
        while open_guesses and len(token_ids) < self._max_nodes:
            negative_path, _, rate, token, parent, depth, votes = heapq.heappop(open_guesses)
            node = self._guesses[parent][token].node = len(token_ids)
            token_ids.append(token)
            parents.append(parent)
            log_probs.append(math.log(rate))
            if depth + 1 < _MAX_DEPTH:
                further = [_Vote(vote.position + 1, min(vote.length + 1, _MAX_MATCH)) for vote in votes]
                expand(node, further, -negative_path, depth + 1)
        return TokenTree(tuple(token_ids), tuple(parents), tuple(log_probs), (SOURCE,)) if token_ids else EMPTY_TREE

    def _kind(self, length: int, share: float, depth: int) -> int:
        kind = bisect.bisect_right(_LENGTHS, length) - 1
        kind = kind * len(_SHARES) + bisect.bisect_right(_SHARES, share) - 1
        return self._first_kind + kind * len(_DEPTHS) + bisect.bisect_right(_DEPTHS, depth) - 1
