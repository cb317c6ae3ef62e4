"""Rounds and their figures from events whose answers are known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coppice.lab.bench.harness.experiment import BenchmarkError
from coppice.lab.bench.timeline import (
    HOPS,
    NUM_WARM_UP_REQUESTS,
    Watched,
    counted_rounds,
    hop_rows,
    ratios,
    rounds_of,
)
from coppice.obs.timeline import TimelineEvent as Event

# How long each hop of a made up round takes, microseconds: all different, so that none can stand for another.
TOOK = dict(zip([name for name, _, _ in HOPS], (11, 12, 13, 14, 150, 16, 17, 18, 19, 20, 300, 22, 23), strict=True))
# From one outcome's leaving to the next one's: all hops but the delta's.
ROUND_US = sum(TOOK.values()) - TOOK["delta to the client"]
PROMPT = 10
TOKENS = 3
VERIFIED, DRAFTED = 7, 4


def request(start: float, num_rounds: int, verified: int = VERIFIED, drafted: int = DRAFTED) -> Watched:
    """One request's events: a prompt's pass, whose outcome leaves at start + 1000, and then rounds of TOKENS tokens."""
    orchestrator = [Event("drafter.open.out", start - 1, sequence=drafted)]
    orchestrator += [Event("verifier.open.out", start, sequence=verified)]
    client: list[Event] = []
    drafter: list[Event] = []
    passes = [Event("pass", start + 500, 450, size=PROMPT, sequences=(verified,))]
    verifier: list[Event] = []
    left = start + 1000
    for index in range(num_rounds + 1):
        base = PROMPT + TOKENS * index
        size, length = TOKENS, base + TOKENS
        verifier.append(Event("orchestrator.outcome.out", left, 0, verified, base, size))
        times = [left]
        for name, _, _ in HOPS[:-1]:
            times.append(times[-1] + TOOK[name])
        came, told, heard, began, ended, tree_left, tree_came, draft_left, draft_came, run, run_ended, over = times[1:]
        orchestrator.append(Event("verifier.outcome.in", came, 0, verified, base, size))
        orchestrator.append(Event("client.delta.out", came + 5, size=size))
        client.append(Event("delta", came + 5 + TOOK["delta to the client"], size=size))
        if index == num_rounds:
            break
        orchestrator.append(Event("drafter.outcome.out", told, 0, drafted, base, size))
        drafter.append(Event("orchestrator.outcome.in", heard, 0, drafted, base, size))
        drafter.append(Event("draft", began, ended - began, drafted, 0, 8))
        drafter.append(Event("orchestrator.tree.out", tree_left, 0, drafted, length, 8))
        orchestrator.append(Event("drafter.tree.in", tree_came, 0, drafted, length, 8))
        orchestrator.append(Event("verifier.draft.out", draft_left, 0, verified, length, 8))
        verifier.append(Event("orchestrator.draft.in", draft_came, 0, verified, length, 8))
        passes.append(Event("pass", run, run_ended - run, size=9, sequences=(verified, 99)))
        # Somebody else's, which has nothing to do with ours.
        passes.append(Event("pass", run - 100, 50, size=9, sequences=(98,)))
        left = over
    return Watched(client, orchestrator, drafter, sorted([*verifier, *passes], key=lambda event: event.at_us))


def both(one: Watched, other: Watched) -> Watched:
    pairs = ((one.client, other.client), (one.orchestrator, other.orchestrator))
    more = ((one.drafter, other.drafter), (one.verifier, other.verifier))
    return Watched(*([*first, *second] for first, second in (*pairs, *more)))


def test_every_hop_has_the_time_that_it_took() -> None:
    [rounds] = rounds_of(request(1000.0, 5))
    assert [(one.length, one.num_tokens) for one in rounds] == [(PROMPT + TOKENS * at, TOKENS) for at in range(1, 6)]
    for row in hop_rows(rounds):
        assert (row["rounds"], row["us_p50"], row["us_p90"]) == (5, TOOK[row["name"]], TOOK[row["name"]])


def test_ratios_are_what_can_be_reckoned_by_hand() -> None:
    [rounds] = rounds_of(request(0.0, 5))
    waited = sum(TOOK[name] for name, _, _ in HOPS[:9])
    found = ratios([rounds])
    assert found == pytest.approx(
        {
            "forward-share": 300 / ROUND_US,
            "waiting-share": waited / ROUND_US,
            "drafted-share": 1.0,
            "bubble_ms": (ROUND_US - 300) / 1000,
            "waiting_ms": waited / 1000,
            "round_ms": ROUND_US / 1000,
            "tokens-per-round": TOKENS,
        }
    )


def test_requests_are_told_apart_and_numbers_of_sequences_may_come_again() -> None:
    first, second = request(0.0, 3), request(1e6, 4, verified=VERIFIED + 1)
    requests = rounds_of(both(first, second))
    assert [len(rounds) for rounds in requests] == [3, 4]
    assert requests[0] == rounds_of(first)[0]
    assert requests[1] == rounds_of(second)[0]


def test_a_round_without_a_draft_waits_until_its_pass() -> None:
    watched = request(0.0, 2)
    plain = replace(
        watched,
        drafter=[],
        verifier=[event for event in watched.verifier if "draft" not in event.what],
        orchestrator=[event for event in watched.orchestrator if "draft" not in event.what],
    )
    [rounds] = rounds_of(plain)
    assert not any("draft_came" in one.at for one in rounds)
    assert rounds[0].waited_us == rounds[0].us("outcome_left", "pass_began")
    names = [row["name"] for row in hop_rows(rounds) if row["rounds"]]
    assert names == ["outcome to the orchestrator", "pass", "verifier, until the outcome leaves", "delta to the client"]


def test_the_warm_up_is_left_out_and_says_where_there_is_nothing() -> None:
    watched = request(0.0, 2)
    for number in range(1, NUM_WARM_UP_REQUESTS + 1):
        watched = both(watched, request(number * 1e6, 3 + number, verified=VERIFIED + number))
    [rounds] = counted_rounds(watched)
    assert len(rounds) == 3 + NUM_WARM_UP_REQUESTS
    assert [row["name"] for row in hop_rows(rounds)] == [name for name, _, _ in HOPS]
    assert ratios([rounds])["forward-share"] == pytest.approx(300 / ROUND_US)
    with pytest.raises(BenchmarkError, match="two rounds"):
        counted_rounds(request(0.0, 3))
