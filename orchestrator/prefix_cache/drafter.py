"""A drafter without a model, in the orchestrator itself.

It knows what followed the same tokens before: in the request's own context, and in what is remembered of others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from coppice.core.tree import EMPTY_TREE, TokenTree
from orchestrator.planner.base import DraftGain
from orchestrator.prefix_cache.estimates import CachePromise, HitRatePrior, HitRates, MatchLengthEstimate
from orchestrator.prefix_cache.guesses import Guesses, TokenCandidate
from orchestrator.prefix_cache.recall import OnRecalled, Recall
from orchestrator.prefix_cache.suffix_index import MAX_MATCH, SEPARATOR, SuffixIndex
from orchestrator.prefix_cache.values import PrefixStatistics
from orchestrator.request.statistics import Statistics

# Deepest draft. Alone it is deep: it comes when its round has begun, and what that leaves of it is the next draft.
_DEPTH_ALONE = 32
_DEPTH_WITH_DRAFTERS = 16
# Occurrences that become candidates, of each kind.
_CANDIDATES = 4
# While nobody knows the price of a row: a path less likely than this is not worth a row of the target's pass; with
# drafters, with whose nodes it competes, it has to be more.
_MIN_PROBABILITY_ALONE = 0.12
_MIN_PROBABILITY_WITH_DRAFTERS = 0.25
# A tree that adds fewer accepted tokens to the drafters' than this is left out: rows are computed in multiples, and it
# may just begin another.
_MIN_GAIN_WITH_DRAFTERS = 0.4
# A tree that goes to the verifier before drafters have said anything has to be worth a round: the verifier no longer
# waits for theirs. Where it is known what they promise, it has to promise as much.
_MIN_GAIN_BEFORE = 1.0
# About what a further row costs of a pass, measured on CPUs.
_ROW_SHARE = 0.04
NO_GAIN = DraftGain()
# However cheap rows are, a guess that is hardly ever right only fills the tree.
_LEAST_PROBABILITY = 0.03


class CacheDrafter:
    """Drafts for one output. Costs a dictionary entry per committed token and some short lists per round."""

    def __init__(
        self,
        rates: HitRates,
        promise: CachePromise,
        make_recall: Callable[[OnRecalled], Recall],
        remember: Callable[[PrefixStatistics], None],
        tokens: Sequence[int],
        num_prompt: int,
        sampled: bool,
    ) -> None:
        """`promise` is what drafters promised all outputs; `tokens` are the request's committed ones, which grow while
        it runs; `remember` gets what it has shown.
        """
        self._rates = rates
        self._remember = remember
        self._tokens = tokens
        self._num_prompt = num_prompt
        self._sampled = sampled
        self._own = SuffixIndex()
        self._num_own = 0
        self._remembered = SuffixIndex()
        self._recall = make_recall(self._on_recalled)
        self._prior = HitRatePrior()
        self._match_lengths = MatchLengthEstimate()
        self._promise = promise.of_output()
        # Whether another request had the same prompt, and its output may be the same.
        self._repeats = False
        # For the committed tokens: what may come next, and the guesses of the last draft.
        self._candidates: list[TokenCandidate] = []
        self._guesses: Guesses | None = None
        self._began = False
        self._closed = False
        # Whether tokens were committed that nobody wanted a draft after, and that were not looked at.
        self._is_behind = False
        self._knows_gain = False
        # Whether the caller drafts anyway when it is done with us.
        self._is_called = False
        # Called when what was remembered may make another draft than the last.
        self.on_news: Callable[[], None] = lambda: None
        # Called when it is known what drafts of requests with the same beginning have gained.
        self.on_gain: Callable[[DraftGain], None] = lambda gain: None

    def begin(self, is_wanted: bool = True) -> None:
        """Ask what is remembered of what is there, and look at it if a draft `is_wanted`; again, it does nothing."""
        if self._began:
            return
        self._began = self._is_called = self._is_behind = True
        self._recall.begin(self._tokens, self._num_prompt)
        self._is_called = False
        if is_wanted:
            self._catch_up()

    def commit(self, token_ids: Sequence[int], is_wanted: bool = True) -> None:
        """These were committed. Called when everyone who waits for them has them.

        Unless a draft `is_wanted` after them nothing is looked for until one is.
        """
        if self._guesses is not None:
            self._guesses.learn(token_ids)
            self._guesses = None
        if self._candidates:
            self._match_lengths.learn(self._candidates[0].token_ids, token_ids)
            self._candidates = []
        self._is_behind = True
        if is_wanted:
            self._catch_up()

    def draft(self, max_nodes: int, batch_size: int, price: float = 0.0) -> TokenTree:
        """A tree for the committed tokens, where there is no other; `batch_size` sequences share a pass.

        `price` is what a row has to bring, in accepted tokens; 0 where that is not known.
        """
        guesses = self._guess(None, max_nodes, _DEPTH_ALONE, _least(_MIN_PROBABILITY_ALONE, batch_size, price))
        return EMPTY_TREE if guesses is None else guesses.tree()

    def draft_before(self, max_nodes: int, batch_size: int, price: float = 0.0) -> TokenTree:
        """A tree for the committed tokens that is worth a round before drafters have answered, or an empty one."""
        guesses = self._guess(None, max_nodes, _DEPTH_ALONE, _least(_MIN_PROBABILITY_WITH_DRAFTERS, batch_size, price))
        least = max(_MIN_GAIN_BEFORE, self._promise.tokens)
        if guesses is None or self._match_lengths.expected_tokens(len(self._candidates[0].token_ids)) < least:
            return EMPTY_TREE
        return guesses.tree(least)

    def draft_with(
        self, drafted: TokenTree, max_nodes: int, batch_size: int, price: float = 0.0, row_multiple: int = 1
    ) -> TokenTree:
        """A tree for the committed tokens that adds enough to `drafted`, or an empty one.

        It may begin another `row_multiple` of rows, and has to be worth that.
        """
        self._promise.add(drafted.prune(max_nodes))
        least = _least(_MIN_PROBABILITY_WITH_DRAFTERS, batch_size, price)
        guesses = self._guess(drafted, max_nodes, _DEPTH_WITH_DRAFTERS, least)
        return EMPTY_TREE if guesses is None else guesses.tree(price * row_multiple or _MIN_GAIN_WITH_DRAFTERS)

    def close(self, statistics: Statistics | None, gain: DraftGain = NO_GAIN) -> None:
        """Ask for nothing more, and remember the output, and what drafts gained, if it has `statistics`."""
        if self._closed:
            return
        self._closed = True
        self._recall.close()
        if statistics is not None and len(self._tokens) > self._num_prompt:
            self._remember(PrefixStatistics.of(statistics, self._prior.hits, self._prior.expected, gain))

    def _guess(
        self, drafted: TokenTree | None, max_nodes: int, max_depth: int, min_probability: float
    ) -> Guesses | None:
        if self._is_behind:
            self._catch_up()
        if not self._candidates:
            return None
        self._guesses = Guesses(self._rates, self._prior, self._sampled, drafted, min_probability)
        for candidate in self._candidates:
            self._guesses.add(candidate, max_depth, max_nodes)
        return self._guesses

    def _catch_up(self) -> None:
        self._is_behind = False
        self._is_called = True
        self._index()
        self._recall.advance(self._tokens)
        self._is_called = False
        self._find()

    def _index(self) -> None:
        self._own.append(self._tokens[self._num_own :])
        self._num_own = len(self._tokens)

    def _find(self) -> None:
        suffix = self._tokens[-MAX_MATCH:]
        self._candidates = [
            TokenCandidate(index.continuation(one.end, _DEPTH_ALONE), one.length, index is self._remembered)
            for index in (self._remembered, self._own)
            for one in index.find(suffix)[:_CANDIDATES]
        ]
        self._candidates.sort(key=lambda one: -one.length)

    def _on_recalled(self, sequences: Iterable[tuple[int, ...]], statistics: PrefixStatistics) -> None:
        self._prior.know(statistics.guess_hits, statistics.guess_expectation_milli / 1000)
        # Reads after the first bring the same again.
        if statistics.asked_rounds and not self._knows_gain:
            self._knows_gain = True
            self.on_gain(statistics.gain)
        for sequence in sequences:
            self._remembered.append((*sequence, SEPARATOR))
        if self._recall.knows_prompt and not self._repeats and not self._sampled:
            self._repeats = True
            self._match_lengths.repeats()
        if not self._is_called and not self._is_behind:
            self._find()
            self.on_news()


def _least(base: float, batch_size: int, price: float) -> float:
    """What a path's probability has to be for its row to pay.

    Without a price: a token is worth the pass of those who share it.
    """
    if price > 0:
        return max(price, _LEAST_PROBABILITY)
    row = _ROW_SHARE * batch_size
    return max(base, row / (1 + row))
