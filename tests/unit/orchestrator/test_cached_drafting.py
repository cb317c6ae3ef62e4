"""Drafts of one request that has the prefix cache: beside a drafter, ahead of it, or alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from coppice.core.sampling import SamplingParams
from coppice.core.tree import TokenTree, chain
from orchestrator.planner.base import FixedPlanner, RoundContext, RoundPlan
from orchestrator.prefix_cache.drafter import CacheDrafter
from orchestrator.prefix_cache.estimates import CachePromise, HitRates
from orchestrator.prefix_cache.keys import CacheNamespace, TenantKeys
from orchestrator.prefix_cache.recall import OnRecalled, Recall
from orchestrator.prefix_cache.store import CacheCounts, MemoryStore
from orchestrator.prefix_cache.values import PrefixStatistics
from orchestrator.request.drafting import BUDGETS_SENT, Drafting
from orchestrator.request.rounds import UNKNOWN_LOAD, VerifierLoad
from orchestrator.request.statistics import Statistics
from orchestrator.request.transcript import Transcript
from tests.unit.orchestrator.request.test_drafting import VOCAB, outcome


class Follower:
    """Stands in for a connected drafter, and notes when it heard of an outcome."""

    needs_features = False
    drafts_ahead = False
    kind = "small-lm"
    connected = True

    def __init__(self, events: list[str]) -> None:
        self._events = events
        self.is_gone = False

    def join(self, handler: object) -> int:
        return 1

    def leave(self, sequence_id: int) -> None:
        pass

    def follows(self, sequence_id: int) -> bool:
        return not self.is_gone

    def outcome(self, *told: object) -> None:
        self._events.append("drafter told")


class PricedPlanner(FixedPlanner):
    """Knows what rows cost."""

    def __init__(self, max_nodes: int, row_price: float, row_multiple: int = 1) -> None:
        super().__init__(max_nodes, linger_us=1000)
        self._row_price, self._row_multiple = row_price, row_multiple

    def plan(self, round_context: RoundContext, load: VerifierLoad = UNKNOWN_LOAD) -> RoundPlan:
        return replace(super().plan(round_context, load), row_price=self._row_price, row_multiple=self._row_multiple)


class Cached:
    """A request with a cache drafter, behind a prompt that repeats itself; with a drafter or without."""

    def __init__(
        self,
        *,
        drafter: bool,
        max_nodes: int = 6,
        max_tokens: int = 40,
        prompt: Sequence[int] = (1, 2, 3, 4, 5, 6) * 4,
        planner: FixedPlanner | None = None,
        synchronous: bool = False,
    ) -> None:
        self.events: list[str] = []
        self.transcript = Transcript(list(prompt), (), max_tokens, 200, (), ())
        keys = TenantKeys(CacheNamespace(b"s", "m", "f"), "")
        shown: list[PrefixStatistics] = []
        self.shown = shown

        def recall(on_recalled: OnRecalled) -> Recall:
            return Recall(MemoryStore(1000, 1.0), keys, CacheCounts(), VOCAB, set(), on_recalled)

        self.cache = CacheDrafter(
            HitRates(), CachePromise(), recall, shown.append, self.transcript.tokens, len(prompt), False
        )
        self.follower = Follower(self.events)
        clients = (self.follower,) if drafter else ()
        self.drafting = Drafting(
            clients,  # type: ignore[arg-type]
            planner or FixedPlanner(max_nodes, linger_us=1000),
            self.transcript,
            SamplingParams(),
            None,
            False,
            VOCAB,
            cache=self.cache,
            synchronous=synchronous,
        )
        self.drafting.open()
        self.linger_us = self.drafting.opening_linger_us()
        self.sent: list[tuple[int, TokenTree, int | None]] = []
        self.drafting.opened(self.send)

    def send(self, base: int, tree: TokenTree, budget: int, linger_us: int | None) -> None:
        self.events.append("draft sent")
        self.sent.append((base, tree, linger_us))

    def commit(self, *tokens: int) -> list[TokenTree]:
        base = self.transcript.length
        self.transcript.append(tokens)
        sent = self.drafting.round_done(outcome(base, tokens))
        self.drafting.round_passed(outcome(base, tokens))
        return sent


def test_where_no_drafter_follows_the_cache_drafts_at_once_and_nobody_is_told_to_wait() -> None:
    one = Cached(drafter=False)
    one.commit(1, 2)
    [(first, tree, _), (second, later, _)] = one.sent
    assert (first, second) == (24, 26)
    assert (1, 2, 3, 4, 5, 6, 1, 2) in set(tree.paths())
    assert (3, 4, 5, 6, 1, 2) in set(later.paths())
    assert not any(linger for _, _, linger in one.sent)
    assert all(len(tree) <= BUDGETS_SENT * 6 for _, tree, _ in one.sent)


def test_synchronous_rounds_wait_for_the_cache_where_it_is_alone_and_have_one_message_each() -> None:
    one = Cached(drafter=False, synchronous=True)
    assert one.linger_us == 1000
    one.commit(1, 2)
    # It knows nothing behind these tokens, and says so: the round waits for that.
    one.commit(9, 8, 7)
    assert [(base, len(tree) > 0) for base, tree, _ in one.sent] == [(24, True), (26, True), (29, False)]
    # What came from elsewhere is for the next round.
    one.cache.on_news()
    assert len(one.sent) == 3
    # The verifier was told to wait once and for all.
    assert {linger for _, _, linger in one.sent} == {None}


def test_synchronous_rounds_wait_for_the_cache_alone_once_the_drafter_is_gone() -> None:
    one = Cached(drafter=True, synchronous=True)
    assert one.sent == []
    one.follower.is_gone = True
    one.drafting.on_drafters_changed()
    [(base, tree, _)] = one.sent
    assert (base, tree.source_names) == (24, ("cache",))
    one.commit(1, 2)
    assert [base for base, _, _ in one.sent] == [24, 26]


def test_where_a_drafter_follows_in_time_the_cache_sends_nothing_by_itself() -> None:
    one = Cached(drafter=True)
    one.drafting.on_tree("small-lm", 24, (), chain([1, 9], [-0.1, -0.1]))
    one.sent.clear()
    one.events.clear()
    one.commit(1, 2)
    assert one.sent == []
    assert one.events == ["drafter told"]


def test_the_cache_goes_ahead_of_a_drafter_that_has_not_answered_in_time() -> None:
    one = Cached(drafter=True)
    [(base, first, _)] = one.sent
    assert (base, first.source_names) == (24, ("cache",))
    one.drafting.on_tree("small-lm", 24, (), chain([1, 2], [-0.1, -0.1]))
    # Both together, which replaces what went ahead.
    assert [(base, tree.source_names) for base, tree, _ in one.sent[1:]] == [(24, ("small-lm", "cache"))]
    one.commit(1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6)
    assert len(one.sent) == 2
    # The drafter has said nothing for the last round, of whose tree nothing is left.
    one.commit(1, 2, 8, 1, 2, 3, 4, 5, 6, 1, 2, 3)
    base, tree, _ = one.sent[-1]
    assert (len(one.sent), base, tree.source_names) == (3, 48, ("cache",))


def test_a_few_unlikely_guesses_do_not_go_ahead_of_a_drafter() -> None:
    one = Cached(drafter=True, max_nodes=0)
    assert one.sent == []
    one = Cached(drafter=True, max_tokens=1)
    assert one.sent == []
    one = Cached(drafter=True, prompt=[1, 2, 3, 4, 5, 6, 7, 9, 1, 2, 3, 8, 2, 3])
    alone = Cached(drafter=False, prompt=[1, 2, 3, 4, 5, 6, 7, 9, 1, 2, 3, 8, 2, 3])
    assert (len(one.sent), len(alone.sent)) == (0, 1)


def test_guesses_that_left_the_output_do_not_go_ahead_of_a_drafter_that_promises_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They say as much as ever; but the output has left them twice, and the drafter's trees promised four tokens."""
    one = Cached(drafter=True, max_tokens=150)
    one.drafting.on_tree("small-lm", 24, (), chain([1, 2, 3, 4], [0.0] * 4))
    # Three and then four tokens as before, and one that is not.
    one.commit(1, 2, 3, 9)
    one.drafting.on_tree("small-lm", 28, (), chain([1, 2, 3, 4], [0.0] * 4))
    one.commit(1, 2, 3, 4, 8)
    before = len(one.sent)
    # The drafter had nothing in time, and guesses are right in all requests but this one.
    monkeypatch.setattr(HitRates, "rate", lambda rates, kind: 0.95)
    one.commit(1, 2, 3, 4, 5, 6, 1)
    assert one.cache._guesses is not None
    assert one.cache._guesses.gain > 4
    assert len(one.sent) == before
    # A while without a mistake, and they do again.
    for _ in range(6):
        one.commit(2, 3, 4, 5, 6, 1)
    assert one.sent[-1][1].source_names == ("cache",)


def test_the_cache_works_when_everyone_has_the_outcome() -> None:
    """Its index is behind while drafters are told."""
    one = Cached(drafter=True)
    indexed: list[int] = []
    follower = one.drafting._drafters._clients[0]
    follower.outcome = lambda *told: indexed.append(one.cache._num_own)  # type: ignore[method-assign]
    one.commit(1, 2)
    assert indexed == [24]
    assert one.cache._num_own == 26


def test_the_caches_nodes_join_the_drafters_tree_in_the_same_message() -> None:
    one = Cached(drafter=True)
    one.drafting.on_tree("small-lm", 24, (), chain([1, 2], [-0.1, -0.1]))
    _, tree, _ = one.sent[-1]
    assert (1, 2, 3, 4) in set(tree.paths())
    names = [tree.sources_of(node) for node in tree.path(tree.children[(1, 3)])]
    assert names == [("small-lm", "cache"), ("small-lm", "cache"), ("cache",)]
    statistics = Statistics()
    statistics.record(outcome(24, (1, 2, 3, 9), accepted=3, nodes=len(tree)), one.commit(1, 2, 3, 9))
    assert statistics.sources["small-lm"].accepted == 2
    assert statistics.sources["cache"].accepted == 3


def test_a_tree_to_which_the_cache_adds_nothing_stays_as_it_is() -> None:
    one = Cached(drafter=True)
    drafted = chain([1, 2, 3, 4, 5, 6] * 4, [-0.01] * 24).labelled("small-lm")
    one.drafting.on_tree("small-lm", 24, (), drafted)
    assert one.sent[-1][1] == drafted


def test_the_cache_drafts_nothing_past_the_end() -> None:
    one = Cached(drafter=False, max_tokens=5)
    assert [tree.depth for _, tree, _ in one.sent] == [4]
    one.commit(1, 2, 3)
    assert one.sent[-1][1].depth == 1


def test_an_output_is_remembered_once_and_only_if_there_is_one() -> None:
    one, empty = Cached(drafter=False), Cached(drafter=False)
    one.commit(1, 2)
    for _ in range(2):
        one.drafting.close(Statistics(rounds=1, accepted_tokens=1))
        empty.drafting.close(Statistics())
    assert [(shown.rounds, shown.tokens) for shown in one.shown] == [(1, 2)]
    assert empty.shown == []


def test_the_more_sequences_share_a_pass_the_likelier_a_guess_has_to_be() -> None:
    sizes = []
    for batch_size in (1, 16, 64, 1000):
        one = Cached(drafter=False)
        one.drafting.load = VerifierLoad(batch_size=batch_size)
        one.commit(1, 2)
        sizes.append(len(one.sent[-1][1]) if one.sent[-1][0] == 26 else 0)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 2 * sizes[2]
    assert sizes[3] == 0


def test_where_the_planner_knows_the_price_of_a_row_a_guess_has_to_be_worth_it_whatever_the_load() -> None:
    trees = []
    for price in (0.01, 0.5, 0.75, 0.999):
        one = Cached(drafter=False, planner=PricedPlanner(20, price))
        one.drafting.load = VerifierLoad(batch_size=1000)
        one.commit(1, 2)
        trees.append(one.sent[-1][1] if one.sent and one.sent[-1][0] == 26 else None)
    cheap, usual, dear, none = trees
    assert cheap is not None
    assert usual is not None
    assert dear is not None
    assert none is None
    assert len(cheap) > len(usual) > len(dear)
    for tree, price in ((usual, 0.5), (dear, 0.75)):
        assert min(tree.path_log_probs) >= math.log(price)


@pytest.mark.parametrize(("row_price", "row_multiple", "adds"), [(0.3, 1, True), (0.3, 4, True), (0.3, 16, False)])
def test_beside_a_drafter_the_caches_tree_has_to_be_worth_a_multiple_of_rows(
    row_price: float, row_multiple: int, adds: bool
) -> None:
    one = Cached(drafter=True, planner=PricedPlanner(6, row_price, row_multiple))
    drafted = chain([1, 2], [-0.1, -0.1])
    one.drafting.on_tree("small-lm", 24, (), drafted)
    # Behind the cache's own, which went ahead.
    [_, (_, tree, _)] = one.sent
    assert (len(tree) > len(drafted)) == adds


class NowAndThen(FixedPlanner):
    """Wants drafts or does not, as it is told."""

    wants = True

    def plan(self, round_context: RoundContext, load: VerifierLoad = UNKNOWN_LOAD) -> RoundPlan:
        return super().plan(round_context, load) if self.wants else RoundPlan(0, 0)


def test_while_no_draft_is_wanted_nothing_is_looked_for_and_the_next_one_is_as_if_it_had_been(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planner = NowAndThen(6, linger_us=1000)
    always, lazy = Cached(drafter=False), Cached(drafter=False, planner=planner)
    searches: list[int] = []
    find = CacheDrafter._find

    def counted(self: CacheDrafter) -> None:
        if self is lazy.cache:
            searches.append(lazy.transcript.length)
        find(self)

    monkeypatch.setattr(CacheDrafter, "_find", counted)
    planner.wants = False
    for tokens in ((1,), (2, 7), (8,), (7, 8)):
        always.commit(*tokens)
        lazy.commit(*tokens)
    assert searches == []
    assert len(lazy.sent) == 1
    planner.wants = True
    for one in (always, lazy):
        one.commit(7)
    assert searches == [24 + 7]
    (base, expected, _), (own_base, own, _) = always.sent[-1], lazy.sent[-1]
    assert base == own_base
    assert set(own.paths()) == set(expected.paths()) != set()


def test_a_request_that_begins_without_drafts_looks_for_nothing() -> None:
    planner = NowAndThen(6, linger_us=1000)
    planner.wants = False
    one = Cached(drafter=False, planner=planner)
    assert one.sent == []
    assert one.cache._num_own == 0
    planner.wants = True
    one.commit(1, 2)
    assert one.cache._num_own == 26
    assert (3, 4, 5, 6) in set(one.sent[-1][1].paths())
