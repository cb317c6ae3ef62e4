"""Cases that can be worked out by hand, to the last bit of time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simulator.clock import Clock
from simulator.deployment import Deployment, Fleet
from simulator.machine import Contention, Machine
from simulator.policies import Policy
from simulator.requests import SimulatedRequest
from simulator.sequences import SimulatedSequence
from simulator.texts import TracedText
from simulator.verifiers import SimulatedVerifier
from tests.unit.simulator.machines import TOKENS, constant_machine, right_trace

PASS_S, GAP_S, DRAFT_S, MESSAGE_S = 0.010, 0.002, 0.003, 0.001
# Behind an outcome: it goes to the drafter, the tree comes back, and goes on to the verifier.
ROUND_TRIP_S = 3 * MESSAGE_S + DRAFT_S


def one_request(policy: str, depth: int, max_tokens: int, machine: Machine) -> SimulatedRequest:
    chosen = Policy.parse(policy)
    deployment = Deployment(chosen.planner(), chosen, machine, Fleet())
    request = deployment.open(TracedText(right_trace(depth)), 100, max_tokens)
    deployment.run(100.0)
    assert request.num_tokens == max_tokens
    return request


def test_plain_decoding_takes_a_pass_and_a_gap_for_each_token() -> None:
    request = one_request("off", 0, 7, constant_machine())
    assert request.first_s == pytest.approx(PASS_S + GAP_S)
    assert request.ended_s == pytest.approx(7 * (PASS_S + GAP_S))


def test_a_prompt_is_computed_in_chunks_with_a_pass_each() -> None:
    # 40 rows at a time: 40, 40, 20, of 1 ms each.
    request = one_request("off", 0, 1, constant_machine(prompt_token_s=0.001, prefill_chunk=40))
    assert request.first_s == pytest.approx(3 * (PASS_S + GAP_S) + 100 * 0.001)


def test_rounds_take_what_is_left_of_a_draft_and_wait_for_the_next() -> None:
    request = one_request("fixed=3", 3, 12, constant_machine())
    # The first token comes with the prompt, whose pass has begun before a draft is there.
    assert request.first_s == pytest.approx(PASS_S + GAP_S)
    # The draft behind the prompt has come meanwhile. Two of its nodes are left, and nothing is known that could be
    # better: the round starts at once. Then two rounds wait for drafts of three nodes: 1 + 3 + 4 + 4 tokens.
    assert request.num_rounds == 4
    assert request.ended_s == pytest.approx(4 * (PASS_S + GAP_S) + 2 * ROUND_TRIP_S)


def test_a_draft_that_is_begun_beside_a_pass_takes_longer() -> None:
    machine = replace(constant_machine(), contention=Contention(draft_factor=5.0))
    # Asked for after a message, while the prompt's pass runs, the first draft takes 15 ms and two messages more. What
    # of it hangs behind the first token is what the second round, the last one, waits for.
    request = one_request("fixed=3", 3, 3, machine)
    assert request.num_rounds == 2
    assert request.ended_s == pytest.approx(3 * MESSAGE_S + 5 * DRAFT_S + PASS_S + GAP_S)


@pytest.mark.parametrize(("ahead_s", "more_s"), [(0.004, 0.002), (1.0, 0.005)])
def test_drafters_take_time_from_the_pass_beside_them_and_no_more_than_it_has(ahead_s: float, more_s: float) -> None:
    clock, ends = Clock(), list[float]()
    machine = replace(constant_machine(), contention=Contention(pass_per_draft=0.5))
    verifier = SimulatedVerifier(clock, machine, 0, lambda: ahead_s)
    text = TracedText(right_trace(0))
    verifier.open(SimulatedSequence(text, 100, 1, 64, 0.0, lambda _: ends.append(clock.now_s)))
    clock.run_until(1.0)
    assert ends == [pytest.approx(PASS_S + more_s + GAP_S)]


@pytest.mark.parametrize("depth", [0, 1, 5])
@pytest.mark.parametrize("policy", ["off", "fixed=4", "planner"])
@pytest.mark.parametrize("max_tokens", [1, 2, 33, len(TOKENS)])
def test_every_token_that_was_asked_for_comes_and_is_counted_once(depth: int, policy: str, max_tokens: int) -> None:
    chosen = Policy.parse(policy)
    deployment = Deployment(chosen.planner(), chosen, constant_machine(), Fleet(2, 3), seed=1)
    ended: list[SimulatedRequest] = []
    for _ in range(5):
        deployment.open(TracedText(right_trace(depth)), 100, max_tokens, ended.append)
    deployment.run(100.0)
    assert [request.num_tokens for request in ended] == [max_tokens] * 5
    assert deployment.counts.tokens == 5 * max_tokens
    assert not any(verifier.num_sequences for verifier in deployment.verifiers)
    assert not any(drafter.num_sequences for drafter in deployment.drafters)
