"""Several drafters of which a plan leaves some out: those have no work, and are told everything when it asks again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from coppice.core.sampling import SamplingParams
from coppice.core.tree import EMPTY_TREE, TokenTree, chain
from orchestrator.peers.drafter_client import DrafterClient
from orchestrator.planner.base import RoundContext, RoundPlan
from orchestrator.request.drafting import Drafting
from orchestrator.request.rounds import UNKNOWN_LOAD, Outcome, VerifierLoad
from orchestrator.request.transcript import Transcript


class ToldPlanner:
    """Leaves out whom it is told to, and keeps what it was asked."""

    def __init__(self, *left_out: str) -> None:
        self.left_out = frozenset(left_out)
        self.max_nodes = 7
        self.sources: tuple[str, ...] = ()

    def runs_on(self, verifier: str) -> None: ...

    def plan(self, round_context: RoundContext, load: VerifierLoad = UNKNOWN_LOAD) -> RoundPlan:
        self.sources = round_context.sources
        return RoundPlan(self.max_nodes, 1000, left_out=self.left_out)

    def tree_arrived(self) -> None: ...

    def select(self, tree: TokenTree) -> TokenTree:
        return tree

    def round_over(self, outcome: Outcome, sent: Sequence[TokenTree], asked: bool) -> None: ...

    def close(self) -> None: ...


def connected(kind: str, messages: list[Any]) -> DrafterClient:
    """A drafter whose stream only remembers what it is sent."""
    client = DrafterClient("127.0.0.1:1", "fingerprint")
    client.kind = kind
    client.stream.send = lambda message, *_: messages.append(message)  # type: ignore[method-assign]
    client.stream.withdraw = lambda _: False  # type: ignore[method-assign]
    client.stream._writer = object()  # type: ignore[assignment]
    return client


class Pair:
    """A request with two drafters, a and b."""

    def __init__(self, *left_out: str, needs_features: bool = False) -> None:
        self.messages: dict[str, list[Any]] = {"a": [], "b": []}
        self.a, self.b = (connected(kind, self.messages[kind]) for kind in "ab")
        self.b.needs_features = needs_features
        self.planner = ToldPlanner(*left_out)
        self.transcript = Transcript([1, 2, 3], (), 40, 100, (), ())
        self.drafting = Drafting((self.a, self.b), self.planner, self.transcript, SamplingParams(), None, False, 50)
        self.drafting.open()
        self.drafting.opening_linger_us()
        self.sent: list[tuple[int, TokenTree]] = []
        self.drafting.opened(lambda base, tree, budget, linger_us: self.sent.append((base, tree)))

    def commit(self, *token_ids: int) -> None:
        outcome = Outcome(self.transcript.length, token_ids, 0, 0, 0, 0, b"", 1, 1000, 0, 0)
        self.transcript.append(token_ids)
        self.drafting.learn(outcome, self.drafting.round_done(outcome))


async def test_one_that_is_left_out_from_the_beginning_is_not_even_opened() -> None:
    one = Pair("b")
    one.commit(4)
    one.commit(5)
    assert one.planner.sources == ("a", "b")
    assert len(one.messages["a"]) == 3
    assert not one.messages["b"]
    one.planner.left_out = frozenset()
    one.commit(6)
    assert list(one.messages["a"][-1].outcome.token_ids) == [6]
    [message] = one.messages["b"]
    assert list(message.open.prompt_token_ids) == [1, 2, 3, 4, 5, 6]


async def test_what_was_withheld_from_one_comes_in_one_message_with_the_limits_that_it_does_not_know() -> None:
    one = Pair()
    one.drafting.on_tree("b", 3, (), chain([4]))
    one.planner.left_out = frozenset({"b"})
    one.commit(4)
    one.planner.max_nodes = 5
    one.commit(5, 6)
    assert [len(one.messages[kind]) for kind in "ab"] == [3, 1]
    one.planner.left_out = frozenset()
    one.commit(8)
    for kind, base, tokens, has_nodes in (("a", 6, [8], False), ("b", 3, [4, 5, 6, 8], True)):
        outcome = one.messages[kind][-1].outcome
        assert (outcome.base_length, list(outcome.token_ids)) == (base, tokens)
        assert outcome.HasField("max_nodes") == has_nodes
    assert one.messages["b"][-1].outcome.max_nodes == 5


async def test_an_empty_tree_ends_the_wait_where_nobody_else_was_asked() -> None:
    one = Pair()
    one.commit(4)
    one.drafting.on_tree("a", 4, (), EMPTY_TREE)
    assert not one.sent
    one.planner.left_out = frozenset({"b"})
    one.commit(5)
    one.drafting.on_tree("a", 5, (), EMPTY_TREE)
    assert one.sent == [(5, EMPTY_TREE)]


async def test_the_first_tree_is_sent_while_another_is_still_drafted() -> None:
    one = Pair()
    one.commit(4)
    one.drafting.on_tree("a", 4, (), chain([5]))
    assert [(base, list(tree.paths())) for base, tree in one.sent] == [(4, [(5,)])]
    one.drafting.on_tree("b", 4, (), chain([6]))
    assert [(base, set(tree.paths())) for base, tree in one.sent[1:]] == [(4, {(5,), (6,)})]


async def test_a_drafter_that_needs_features_is_told_of_every_outcome_and_nobody_is_chosen_beside_it() -> None:
    one = Pair("b", needs_features=True)
    assert one.planner.sources == ()
    one.planner.left_out = frozenset()
    one.commit(4)
    one.planner.max_nodes = 0
    one.commit(5)
    one.commit(6)
    # The other one still reads, and is told once to stop.
    assert [len(one.messages[kind]) for kind in "ab"] == [3, 3]
    assert one.messages["a"][-1].outcome.max_nodes == 0
    assert list(one.messages["b"][-1].outcome.token_ids) == [6]


@pytest.mark.parametrize("left_out", [True, False])
async def test_a_replica_takes_over_only_what_is_asked(left_out: bool) -> None:
    one = Pair()
    one.planner.left_out = frozenset({"b"} if left_out else ())
    one.commit(4)
    messages: list[Any] = []
    other = connected("b", messages)
    one.drafting.on_drafter_replaced(one.b, other)
    assert len(messages) == (not left_out)
    one.planner.left_out = frozenset()
    one.commit(5)
    assert list(messages[0].open.prompt_token_ids) == ([1, 2, 3, 4, 5] if left_out else [1, 2, 3, 4])
    assert len(messages) == (1 if left_out else 2)


async def test_where_the_only_one_that_was_asked_is_lost_there_is_nothing_to_choose() -> None:
    one = Pair("b")
    one.a.stream._writer = None
    one.drafting.on_drafters_changed()
    assert one.planner.sources == ()


async def test_a_drafter_that_changes_its_kind_is_not_joined_twice() -> None:
    pair = Pair()
    # Another program at the same address, or a byte that the network has changed.
    pair.b.kind = "a"
    pair.drafting.on_drafter_replaced(pair.a, pair.b)
    assert (pair.a.num_sequences, pair.b.num_sequences) == (0, 1)
    pair.drafting.on_drafter_replaced(pair.b, pair.a)
    assert (pair.a.num_sequences, pair.b.num_sequences) == (1, 0)
    pair.drafting.close()
    assert (pair.a.num_sequences, pair.b.num_sequences) == (0, 0)
