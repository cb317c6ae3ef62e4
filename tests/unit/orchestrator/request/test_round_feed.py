"""Rounds for those who watch: states of nodes, filters, queues that lose their oldest, and nothing without a watch."""

from __future__ import annotations

import pytest

from coppice.core.errors import UnavailableError
from coppice.core.tree import EMPTY_TREE, TokenTree
from coppice.v1 import inference_pb2
from orchestrator.planner.base import RoundPlan
from orchestrator.request import round_feed
from orchestrator.request.round_feed import MAX_UNREAD, EndedRound, RoundFeed
from orchestrator.request.rounds import Outcome

A, R, P = (
    inference_pb2.NODE_STATE_ACCEPTED,
    inference_pb2.NODE_STATE_REJECTED,
    inference_pb2.NODE_STATE_PRUNED,
)
PLAN = RoundPlan(4, 0)


def outcome(*token_ids: int, accepted: int = 0, nodes: int = 0) -> Outcome:
    return Outcome(
        base_length=10,
        token_ids=token_ids,
        num_accepted=accepted,
        draft_nodes=nodes,
        draft_depth=0,
        redraft_nodes=0,
        features=b"",
        pass_rows=1,
        pass_us=1000,
        linger_us=0,
        stale_drafts=0,
    )


def ended(
    result: Outcome, *sent: TokenTree, offered: TokenTree = EMPTY_TREE, tenant: str = "", request_id: str = "r"
) -> EndedRound:
    return EndedRound(tenant, request_id, 0, 1.0, 0, result, sent, offered, PLAN)


# Two chains: 1-2-3 and 7-8.
OFFERED = TokenTree((1, 2, 3, 7, 8), (-1, 0, 1, -1, 3), (-0.1, -0.2, -0.3, -1.0, -2.0), ("a", "b"), (1, 1, 3, 2, 2))


def test_verified_nodes_come_first_and_those_that_were_cut_are_pruned() -> None:
    sent = OFFERED.select([0, 1, 3])
    tree, states = ended(outcome(1, 5, accepted=1, nodes=3), sent, offered=OFFERED).nodes()
    assert tree.token_ids == (1, 2, 7, 3, 8)
    assert tree.parents == (-1, 0, -1, 1, 2)
    assert states == [A, R, R, P, P]
    assert [tree.sources_of(node) for node in range(5)] == [("a",), ("a",), ("b",), ("a", "b"), ("b",)]


def test_a_round_without_a_draft_has_what_came_too_late_for_it() -> None:
    tree, states = ended(outcome(5), OFFERED, offered=OFFERED).nodes()
    assert tree == OFFERED
    assert states == [P] * 5
    assert len(ended(outcome(5)).nodes()[0]) == 0


def test_what_is_accepted_of_a_tree_that_was_not_sent_is_left_out() -> None:
    # The verifier's own word: these tokens are none of the trees that were sent.
    tree, states = ended(outcome(9, 9, accepted=1, nodes=5), OFFERED).nodes()
    assert tree == OFFERED
    assert states == [R] * 5


async def test_watches_see_what_is_theirs_in_order_and_lose_the_oldest() -> None:
    feed = RoundFeed()
    with feed.watch("x", "alice") as own, feed.watch("x", None) as every, feed.watch("x", None, "wanted") as one:
        for number in range(MAX_UNREAD + 3):
            feed.publish(ended(outcome(number), tenant="bob"))
        feed.publish(ended(outcome(7), tenant="alice", request_id="wanted"))
        for watch in (own, one):
            seen = await watch.next(0.0)
            assert seen is not None
            assert seen.outcome.token_ids == (7,)
            assert await watch.next(0.0) is None
            assert watch.take_missed() == 0
        first = await every.next(0.0)
        assert first is not None
        assert first.outcome.token_ids == (4,)
        assert (every.take_missed(), every.take_missed()) == (4, 0)
    assert not feed.is_watched


async def test_a_feed_that_closes_ends_its_watches() -> None:
    feed = RoundFeed()
    with feed.watch("x", None) as watch:
        feed.publish(ended(outcome(1)))
        feed.close()
        with pytest.raises(UnavailableError):
            await watch.next(1.0)
    with pytest.raises(UnavailableError), feed.watch("x", None):
        pass


async def test_nothing_is_made_of_a_round_that_is_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    feed = RoundFeed()
    rounds = feed.output("alice", "r", 2)
    with monkeypatch.context() as patch:
        # Not even the time is asked for.
        patch.setattr(round_feed, "time", None)
        rounds.round_over(outcome(1), [OFFERED], OFFERED, PLAN)
    with feed.watch("x", None) as watch:
        for token in (2, 3):
            rounds.round_over(outcome(token), [OFFERED], OFFERED, PLAN)
        first, second = await watch.next(0.0), await watch.next(0.0)
    assert first is not None
    assert second is not None
    assert (first.tenant, first.request_id, first.output_index, first.outcome.token_ids) == ("alice", "r", 2, (2,))
    assert first.round_us == 0
    assert second.round_us > 0
