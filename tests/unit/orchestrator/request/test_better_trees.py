"""A quick drafter's tree waits for a better one where that pays, and never for long."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from coppice.core.sampling import SamplingParams
from coppice.core.tree import TokenTree, chain
from coppice.v1 import sampling_pb2
from orchestrator.peers.drafter_client import DrafterClient
from orchestrator.planner.base import FixedPlanner
from orchestrator.request.better_trees import COMPARED_TOKENS, AskTimes
from orchestrator.request.drafting import Drafting
from orchestrator.request.rounds import Outcome
from orchestrator.request.source_records import FEWEST_ROUNDS, SourceRecords
from orchestrator.request.transcript import Transcript

# What the better tree takes, by the records; the verifier waits four times as long.
SLOW_S = 0.05
LINGER_US = 200_000


def connected(kind: str) -> DrafterClient:
    """A drafter that never says anything by itself."""
    client = DrafterClient("127.0.0.1:1", "fingerprint")
    client.kind = kind
    client.stream.send = lambda *_: None  # type: ignore[method-assign]
    client.stream.withdraw = lambda _: False  # type: ignore[method-assign]
    client.stream._writer = object()  # type: ignore[assignment]
    return client


def records() -> SourceRecords:
    """The slow drafter's trees are worth three tokens more."""
    known = SourceRecords()
    for _ in range(FEWEST_ROUNDS):
        known.compare({"quick": 1, "slow": 4})
        known.took("slow", SLOW_S)
        known.compare({"quick": 1, "slow": 4, "slowest": 9})
        known.took("slowest", 2 * SLOW_S)
    return known


class Pair:
    """A request that both have drafted for, behind 3 + 2 x 40 tokens; each round took 10 s by its clock."""

    def __init__(self, linger_us: int = LINGER_US, *, both: bool = True, slowest: bool = False, **others: Any) -> None:
        """`both` have drafted for it already; with `slowest`, a third one too."""
        self.now_s = 0.0
        self.quick, self.slow, self.slowest = connected("quick"), connected("slow"), connected("slowest")
        self.transcript = Transcript([1, 2, 3], (), 200, 500, (), ())
        self.records = records()
        self.drafting = Drafting(
            (self.quick, self.slow, self.slowest) if slowest else (self.quick, self.slow),
            FixedPlanner(6, linger_us),
            self.transcript,
            SamplingParams(),
            None,
            False,
            50,
            records=self.records,
            clock=lambda: self.now_s,
            **others,
        )
        self.drafting.open()
        self.drafting.opening_linger_us()
        self.sent: list[tuple[int, TokenTree]] = []
        self.drafting.opened(lambda base, tree, budget, linger_us: self.sent.append((base, tree)))
        for _ in range(2):
            self.commit(*range(40))
        self.tree("quick", 9)
        if both:
            self.tree("slow", 8)
        if slowest:
            self.tree("slowest", 7)
        self.commit(8)
        self.sent.clear()

    def commit(self, *token_ids: int) -> None:
        self.now_s += 10
        outcome = Outcome(self.transcript.length, token_ids, 0, 0, 0, 0, b"", 1, 1000, 0, 0)
        self.transcript.append(token_ids)
        self.drafting.learn(outcome, self.drafting.round_done(outcome))

    def tree(self, source: str, *token_ids: int, base: int | None = None) -> None:
        self.drafting.on_tree(source, self.transcript.length if base is None else base, (), chain(token_ids))

    @property
    def last(self) -> set[tuple[int, ...]]:
        return set(self.sent[-1][1].paths())


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """No exception of a timer goes unseen."""
    errors: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: errors.append(context))
    yield
    loop.set_exception_handler(None)
    assert not errors


async def test_the_quick_tree_waits_and_goes_with_the_better_one() -> None:
    one = Pair()
    one.tree("quick", 5)
    assert not one.sent
    assert one.records.num_waits == 1
    one.tree("slow", 6, 7)
    assert one.last == {(5,), (6,), (6, 7)}
    with nothing_left():
        await asyncio.sleep(2 * SLOW_S)
    assert len(one.sent) == 1


async def test_the_better_tree_does_not_wait_for_the_quick_one() -> None:
    one = Pair()
    one.tree("slow", 6, 7)
    assert one.last == {(6,), (6, 7)}
    # Nor does what comes behind it.
    one.tree("quick", 5)
    assert one.last == {(5,), (6,), (6, 7)}


async def test_of_three_each_waits_as_long_as_it_pays_and_none_behind_what_was_sent() -> None:
    one = Pair(slowest=True)
    one.tree("quick", 5)
    one.tree("slow", 6)
    assert not one.sent
    await asyncio.sleep(4 * SLOW_S)
    assert one.last == {(5,), (6,)}
    one.tree("slowest", 7)
    assert one.last == {(5,), (6,), (7,)}
    one.commit(7)
    one.sent.clear()
    one.records._gains["slow", "slowest"].value = 0
    one.tree("slow", 6)
    assert one.last == {(6,)}
    one.records._gains["slow", "slowest"].value = 5
    one.tree("quick", 5)
    assert one.last == {(5,), (6,)}


async def test_what_does_not_come_is_given_up_while_the_verifier_still_waits() -> None:
    one = Pair()
    one.tree("quick", 5)
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    with nothing_left():
        while not one.sent:
            await asyncio.sleep(0.001)
            assert loop.time() - started_s < LINGER_US / 1e6
    assert one.last == {(5,)}
    one.tree("slow", 6)
    assert one.last == {(5,), (6,)}


@pytest.mark.parametrize("linger_us", [0, 1000])
async def test_nothing_waits_longer_than_the_verifier(linger_us: int) -> None:
    """It would have begun without any tree."""
    one = Pair(linger_us)
    one.tree("quick", 5)
    if linger_us:
        assert not one.sent
        await asyncio.sleep(0.02)
    assert one.last == {(5,)}


async def test_nothing_waits_for_a_drafter_that_has_not_drafted_yet() -> None:
    """It may have a long prompt to read."""
    one = Pair(both=False)
    one.tree("quick", 5)
    assert one.last == {(5,)}


async def test_nothing_waits_for_a_drafter_that_has_gone() -> None:
    one = Pair()
    one.slow.stream._writer = None
    one.tree("quick", 5)
    assert one.last == {(5,)}


async def test_nothing_waits_where_tokens_come_faster() -> None:
    one = Pair()
    for _ in range(60):
        # A token in 5 ms: 10 in what the better tree takes, which adds 3.
        one.commit(1)
        one.now_s -= 9.995
    one.sent.clear()
    one.tree("quick", 5)
    assert one.last == {(5,)}


async def test_a_round_that_began_without_it_gets_the_tree_as_a_late_one() -> None:
    one = Pair()
    base = one.transcript.length
    arrivals: list[bool] = []
    one.drafting._planner.tree_arrived = lambda: arrivals.append(True)  # type: ignore[method-assign]
    one.tree("quick", 5, 6)
    assert not one.sent
    assert not arrivals
    one.commit(5)
    # Drafters owe the request nothing any more.
    assert arrivals == [True]
    assert [(length, set(tree.paths())) for length, tree in one.sent] == [(base, {(5,), (5, 6)})]
    with nothing_left():
        await asyncio.sleep(2 * SLOW_S)
    assert len(one.sent) == 1


async def test_an_empty_tree_of_the_better_drafter_ends_the_wait() -> None:
    one = Pair()
    one.tree("quick", 5)
    one.tree("slow")
    assert one.last == {(5,)}
    with nothing_left():
        await asyncio.sleep(2 * SLOW_S)
    assert len(one.sent) == 1


async def test_a_request_that_ends_leaves_no_timer() -> None:
    one = Pair()
    one.tree("quick", 5)
    better = one.drafting._better
    assert better is not None
    assert better.are_awaited
    one.drafting.close()
    assert not better.are_awaited
    with nothing_left():
        await asyncio.sleep(2 * SLOW_S)
    assert not one.sent


async def test_synchronous_rounds_wait_for_everybody_anyway() -> None:
    one = Pair(synchronous=True)
    one.tree("quick", 5)
    assert not one.sent
    assert one.records.num_waits == 0
    await asyncio.sleep(2 * SLOW_S)
    assert not one.sent


async def test_sampled_trees_never_wait() -> None:
    """Whether one comes must not depend on what another says."""
    one = Pair(acceptance=sampling_pb2.ACCEPTANCE_RULE_UNSPECIFIED)
    assert one.drafting._better is not None
    sampling = SamplingParams(temperature=1.0)
    rule = sampling_pb2.ACCEPTANCE_RULE_TRAVERSAL
    clients = (one.quick, one.slow)
    sampled = Drafting(clients, FixedPlanner(6, 1000), one.transcript, sampling, None, False, 50, acceptance=rule)
    assert sampled._better is None


async def test_trees_are_compared_by_what_was_committed_behind_them_whenever_they_came() -> None:
    one = Pair(both=False)
    base = one.transcript.length
    fresh = one.records = one.drafting._better._records = SourceRecords()  # type: ignore[union-attr]
    one.tree("quick", 5, 9)
    one.commit(5, 6)
    # Too late for the round, and right for three tokens.
    one.tree("slow", 5, 6, 7, 9, base=base)
    one.commit(7, *range(10, 10 + COMPARED_TOKENS - 4))
    assert not fresh._gains
    one.commit(1)
    assert fresh._gains["quick", "slow"].value == 2
    assert fresh._gains["slow", "quick"].value == 0


async def test_trees_for_lengths_far_away_are_not_kept() -> None:
    one = Pair()
    better = one.drafting._better
    assert better is not None
    for base in range(500):
        one.tree("slow", 1, base=base)
    assert len(better._trees) <= COMPARED_TOKENS


def test_times_are_from_the_first_that_was_asked_and_those_of_long_ago_are_forgotten() -> None:
    now_s = 5.0
    asked = AskTimes(lambda: now_s)
    asked.note(10)
    now_s = 5.25
    asked.note(10)
    now_s = 5.5
    assert asked.elapsed_s(10) == 0.5
    assert asked.elapsed_s(11) is None
    for length in range(1000):
        asked.note(length)
    assert asked.elapsed_s(0) is None
    assert asked.elapsed_s(999) == 0
