"""Model-free drafter inside the orchestrator.

It proposes what followed the same tokens before: in the request's own context, and in remembered requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from coppice.core.tree import EMPTY_TREE, TokenTree
from orchestrator.prefix_cache.estimates import CachePromise, HitRatePrior, HitRates, MatchLengthEstimate
from orchestrator.prefix_cache.guesses import Guesses, TokenCandidate
from orchestrator.prefix_cache.recall import OnRecalled, Recall
from orchestrator.prefix_cache.suffix_index import MAX_MATCH, SEPARATOR, SuffixIndex
from orchestrator.prefix_cache.values import PrefixStatistics
from orchestrator.request.statistics import DraftGain, Statistics

# Deepest draft. Alone it is deep: it arrives after its round has begun, and its remainder is the next draft.
_DEPTH_ALONE = 32
_DEPTH_WITH_DRAFTERS = 16
# Occurrences used as candidates, per index.
_CANDIDATES = 4
# Without a price: lowest path probability worth a row of the pass. Higher with drafters, whose nodes compete for the
# budget.
_MIN_PROBABILITY_ALONE = 0.12
_MIN_PROBABILITY_WITH_DRAFTERS = 0.25
# Fewest expected tokens that a tree must add to the drafters' draft: rows are padded to multiples, and it may start
# another one.
_MIN_GAIN_WITH_DRAFTERS = 0.4
# Fewest expected tokens of a tree sent before the drafters' answer, since the verifier then no longer waits for
# theirs. At least the drafters' mean promise, once known.
_MIN_GAIN_BEFORE = 1.0
# Cost of another row relative to a pass, measured on CPUs.
_ROW_SHARE = 0.04
NO_GAIN = DraftGain()
# Lowest path probability at any price: unlikely guesses only fill the tree.
_LEAST_PROBABILITY = 0.03


class CacheDrafter:
    """Drafts for one output. Costs a dictionary entry per committed token and a few short lists per round."""

    def __init__(
        self,
        rates: HitRates,
        promise: CachePromise,
        make_recall: Callable[[OnRecalled], Recall],
        remember: Callable[[PrefixStatistics], None],
        tokens: Sequence[int],
        num_prompt: int,
        sampled: bool,
        drafts_own: bool = True,
    ) -> None:
        """`promise` is the drafters' mean promise over all outputs; `tokens` are the committed ones and grow while the
        request runs; `remember` receives its statistics at the end. Without `drafts_own` only the text of earlier
        requests is used: the verifier looks at the request's own.
        """
        self._rates = rates
        self._remember = remember
        self._tokens = tokens
        self._num_prompt = num_prompt
        self._sampled = sampled
        self._own = SuffixIndex() if drafts_own else None
        self._num_own = 0
        self._remembered = SuffixIndex()
        self._recall = make_recall(self._on_recalled)
        self._prior = HitRatePrior()
        self._match_lengths = MatchLengthEstimate()
        self._promise = promise.of_output()
        # Whether another request had the same prompt, so that its output may repeat.
        self._repeats = False
        # For the committed tokens: candidate continuations, and guesses of the last draft.
        self._candidates: list[TokenCandidate] = []
        self._guesses: Guesses | None = None
        self._began = False
        self._closed = False
        # Whether tokens were committed without indexing them, because no draft was wanted.
        self._is_behind = False
        self._knows_gain = False
        # Set during calls after which the caller drafts anyway.
        self._is_called = False
        # Called when a read may have changed the draft.
        self.on_news: Callable[[], None] = lambda: None
        # Called when the gain of drafts in requests with the same beginning is known.
        self.on_gain: Callable[[DraftGain], None] = lambda gain: None

    def begin(self, is_wanted: bool = True) -> None:
        """Start the first read, and search if a draft `is_wanted`; further calls do nothing."""
        if self._began:
            return
        self._began = self._is_called = self._is_behind = True
        self._recall.begin(self._tokens, self._num_prompt)
        self._is_called = False
        if is_wanted:
            self._catch_up()

    def commit(self, token_ids: Sequence[int], is_wanted: bool = True) -> None:
        """Report committed tokens, after everything on the critical path.

        Unless a draft `is_wanted`, indexing is postponed until one is.
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
        """Tree for the committed tokens if there is no other draft; `batch_size` sequences share a pass.

        `price` is the gain that a row must bring, in accepted tokens; 0 if unknown.
        """
        guesses = self._guess(None, max_nodes, _DEPTH_ALONE, _least(_MIN_PROBABILITY_ALONE, batch_size, price))
        return EMPTY_TREE if guesses is None else guesses.tree()

    def draft_before(self, max_nodes: int, batch_size: int, price: float = 0.0) -> TokenTree:
        """Tree to send before the drafters' answer; empty if it is not worth a round."""
        guesses = self._guess(None, max_nodes, _DEPTH_ALONE, _least(_MIN_PROBABILITY_WITH_DRAFTERS, batch_size, price))
        least = max(_MIN_GAIN_BEFORE, self._promise.tokens)
        if guesses is None or self._match_lengths.expected_tokens(len(self._candidates[0].token_ids)) < least:
            return EMPTY_TREE
        return guesses.tree(least)

    def draft_with(
        self, drafted: TokenTree, max_nodes: int, batch_size: int, price: float = 0.0, row_multiple: int = 1
    ) -> TokenTree:
        """Tree that adds enough to `drafted`; empty if none does.

        It may cost another `row_multiple` of rows, which it must be worth.
        """
        self._promise.add(drafted.prune(max_nodes))
        least = _least(_MIN_PROBABILITY_WITH_DRAFTERS, batch_size, price)
        guesses = self._guess(drafted, max_nodes, _DEPTH_WITH_DRAFTERS, least)
        return EMPTY_TREE if guesses is None else guesses.tree(price * row_multiple or _MIN_GAIN_WITH_DRAFTERS)

    def close(self, statistics: Statistics | None, gain: DraftGain = NO_GAIN) -> None:
        """Stop, and remember the output and the drafts' gain if it has `statistics`."""
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
        if self._own is not None:
            self._own.append(self._tokens[self._num_own :])
        self._num_own = len(self._tokens)

    def _find(self) -> None:
        suffix = self._tokens[-MAX_MATCH:]
        self._candidates = [
            TokenCandidate(index.continuation(one.end, _DEPTH_ALONE), one.length, index is self._remembered)
            for index in (self._remembered, self._own)
            if index is not None
            for one in index.find(suffix)[:_CANDIDATES]
        ]
        self._candidates.sort(key=lambda one: -one.length)

    def _on_recalled(self, sequences: Iterable[tuple[int, ...]], statistics: PrefixStatistics) -> None:
        self._prior.know(statistics.guess_hits, statistics.guess_expectation_milli / 1000)
        # Later reads bring the same statistics again.
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
    """Lowest path probability that is worth a row.

    Without a price, a token is worth a pass shared by `batch_size` sequences.
    """
    if price > 0:
        return max(price, _LEAST_PROBABILITY)
    row = _ROW_SHARE * batch_size
    return max(base, row / (1 + row))
