"""A request whose plan wants no drafts: drafters have no work with it, and are told everything when that changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from coppice.core.sampling import SamplingParams
from coppice.core.tree import TokenTree, chain
from coppice.v1 import sampling_pb2
from orchestrator.peers.drafter_client import DrafterClient
from orchestrator.planner.base import RoundContext, RoundPlan
from orchestrator.request.drafting import Drafting
from orchestrator.request.rounds import UNKNOWN_LOAD, Outcome, VerifierLoad
from orchestrator.request.statistics import DraftGain
from orchestrator.request.transcript import Transcript


class ToldPlanner:
    """Plans what it is told to."""

    def __init__(self, max_nodes: int) -> None:
        self.max_nodes = max_nodes
        self.learned: list[bool] = []

    def runs_on(self, verifier: str) -> None: ...

    def plan(self, round_context: RoundContext, load: VerifierLoad = UNKNOWN_LOAD) -> RoundPlan:
        return RoundPlan(self.max_nodes, 1000 if self.max_nodes else 0)

    def tree_arrived(self) -> None: ...

    def select(self, tree: TokenTree) -> TokenTree:
        return tree

    def round_over(self, outcome: Outcome, sent: Sequence[TokenTree], asked: bool) -> None:
        self.learned.append(asked)

    def know(self, known: DraftGain) -> None: ...

    @property
    def gain(self) -> DraftGain:
        return DraftGain()

    def close(self) -> None: ...


class Following:
    """A request and its one drafter, whose stream only remembers what it is sent."""

    def __init__(self, max_nodes: int) -> None:
        self.messages: list[Any] = []
        self.client = DrafterClient("127.0.0.1:1", "fingerprint")
        self.client.stream.send = lambda message, *_: self.messages.append(message)  # type: ignore[method-assign]
        self.client.stream._writer = object()  # type: ignore[assignment] # connected
        self.planner = ToldPlanner(max_nodes)
        self.transcript = Transcript([1, 2, 3], (), 40, 100, (), ())
        rule = sampling_pb2.ACCEPTANCE_RULE_UNSPECIFIED
        self.drafting = Drafting(
            (self.client,), self.planner, self.transcript, SamplingParams(), None, False, 50, acceptance=rule
        )
        self.drafting.open()
        self.sent: list[tuple[int, TokenTree]] = []
        self.drafting.opened(lambda base, tree, budget, linger_us: self.sent.append((base, tree)))

    def commit(self, *token_ids: int) -> None:
        outcome = Outcome(self.transcript.length, token_ids, 0, 0, 0, 0, b"", 1, 1000, 0, 0)
        self.transcript.append(token_ids)
        self.drafting.learn(outcome, self.drafting.round_done(outcome))


async def test_a_request_that_begins_without_drafts_is_told_to_no_drafter_until_one_is_wanted() -> None:
    one = Following(max_nodes=0)
    one.commit(4)
    one.commit(5, 6)
    assert not one.messages
    one.planner.max_nodes = 7
    one.commit(8)
    [message] = one.messages
    assert list(message.open.prompt_token_ids) == [1, 2, 3, 4, 5, 6, 8]
    assert message.open.max_nodes == 7


async def test_what_was_withheld_comes_in_one_message() -> None:
    one = Following(max_nodes=7)
    one.drafting.on_tree(one.client.kind, 3, (), chain([4, 5]))
    one.planner.max_nodes = 0
    one.commit(4)
    one.commit(5, 6)
    assert len(one.messages) == 1
    one.planner.max_nodes = 5
    one.commit(8)
    outcome = one.messages[-1].outcome
    assert (outcome.base_length, list(outcome.token_ids), outcome.max_nodes) == (3, [4, 5, 6, 8], 5)
    one.commit(9)
    outcome = one.messages[-1].outcome
    assert (outcome.base_length, list(outcome.token_ids), outcome.HasField("max_nodes")) == (7, [9], False)


async def test_a_drafter_that_still_reads_is_told_to_stop_once() -> None:
    one = Following(max_nodes=7)
    one.planner.max_nodes = 0
    one.commit(4)
    one.commit(5)
    [_, stop] = one.messages
    assert (list(stop.outcome.token_ids), stop.outcome.max_nodes) == ([4], 0)
    assert stop.outcome.HasField("max_nodes")
    one.planner.max_nodes = 7
    one.commit(6)
    outcome = one.messages[-1].outcome
    assert (outcome.base_length, list(outcome.token_ids), outcome.max_nodes) == (4, [5, 6], 7)


async def test_a_drafter_that_came_back_meanwhile_is_told_the_rest_only() -> None:
    one = Following(max_nodes=7)
    one.planner.max_nodes = 0
    one.commit(4)
    one.client.on_up()
    assert list(one.messages[-1].open.prompt_token_ids) == [1, 2, 3, 4]
    one.commit(5)
    one.planner.max_nodes = 7
    one.commit(6)
    outcome = one.messages[-1].outcome
    assert (outcome.base_length, list(outcome.token_ids)) == (4, [5, 6])


@pytest.mark.parametrize("wanted", [True, False])
async def test_a_late_draft_is_verified_only_while_drafts_are_wanted(wanted: bool) -> None:
    one = Following(max_nodes=7)
    one.planner.max_nodes = 7 if wanted else 0
    one.commit(4)
    num_sent = len(one.sent)
    one.drafting.on_tree("a", 3, (), chain([4, 5]))
    assert len(one.sent) == num_sent + wanted
    assert one.drafting.stale == ({} if wanted else {"unwanted": 1})


async def test_the_planner_learns_of_which_rounds_drafts_had_been_wanted() -> None:
    one = Following(max_nodes=7)
    one.planner.max_nodes = 0
    one.commit(4)
    one.commit(5)
    one.planner.max_nodes = 7
    one.commit(6)
    one.commit(8)
    assert one.planner.learned == [True, False, False, True]
