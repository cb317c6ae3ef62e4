"""Cases that can be worked out by hand, to the last bit of time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coppice.core.tree import EMPTY_TREE
from coppice.lab.simulator.deployment import Deployment, Fleet
from coppice.lab.simulator.loads import ClosedLoad, Workload
from coppice.lab.simulator.machine import Contention, Machine, OrchestratorCosts
from coppice.lab.simulator.orchestrators import Clock, SimulatedOrchestrator
from coppice.lab.simulator.policies import Policy
from coppice.lab.simulator.profile import Trace, TracedText
from coppice.lab.simulator.requests import SimulatedRequest
from coppice.lab.simulator.sequences import SimulatedSequence
from coppice.lab.simulator.verifiers import SimulatedVerifier
from tests.unit.coppice.lab.simulator.machines import TOKENS, constant_machine, right_trace

PASS_S, GAP_S, DRAFT_S, MESSAGE_S = 0.010, 0.002, 0.003, 0.001
# Behind an outcome: it goes to the orchestrator and on to the drafter, and the tree comes back the same way.
ROUND_TRIP_S = 4 * MESSAGE_S + DRAFT_S


def one_request(policy: str, depth: int, max_tokens: int, machine: Machine) -> SimulatedRequest:
    chosen = Policy.parse(policy)
    deployment = Deployment(chosen.planner(), chosen, machine, Fleet())
    request = deployment.open(TracedText(right_trace(depth)), 100, max_tokens)
    deployment.run(100.0)
    assert request.num_tokens == max_tokens
    return request


def test_plain_decoding_takes_a_pass_and_a_gap_for_each_token() -> None:
    request = one_request("off", 0, 7, constant_machine())
    assert request.first_s == pytest.approx(PASS_S + GAP_S + MESSAGE_S)
    assert request.ended_s == pytest.approx(7 * (PASS_S + GAP_S) + MESSAGE_S)


def test_a_pass_starts_later_by_what_it_takes_to_plan_it() -> None:
    request = one_request("off", 0, 7, constant_machine(start_s=0.001, start_sequence_s=0.0005))
    assert request.ended_s == pytest.approx(7 * (PASS_S + GAP_S + 0.0015) + MESSAGE_S)


def test_a_prompt_is_computed_in_chunks_with_a_pass_each() -> None:
    # 40 rows at a time: 40, 40, 20, of 1 ms each.
    request = one_request("off", 0, 1, constant_machine(prompt_token_s=0.001, prefill_chunk=40))
    assert request.first_s == pytest.approx(3 * (PASS_S + GAP_S) + 100 * 0.001 + MESSAGE_S)


def test_rounds_take_what_is_left_of_a_draft_and_wait_for_the_next() -> None:
    request = one_request("fixed=3", 3, 12, constant_machine())
    # The first token comes with the prompt, whose pass has begun before a draft is there.
    assert request.first_s == pytest.approx(PASS_S + GAP_S + MESSAGE_S)
    # The draft behind the prompt has come meanwhile. Two of its nodes are left, and nothing is known that could be
    # better: the round starts at once. Then two rounds wait for drafts of three nodes: 1 + 3 + 4 + 4 tokens.
    assert request.num_rounds == 4
    assert request.ended_s == pytest.approx(4 * (PASS_S + GAP_S) + 2 * ROUND_TRIP_S + MESSAGE_S)


def test_an_orchestrator_takes_its_time_with_outcomes_and_with_trees() -> None:
    costs = OrchestratorCosts(outcome_s=0.0004, tree_s=0.0003)
    request = one_request("fixed=3", 3, 12, replace(constant_machine(), orchestrator=costs))
    # The same rounds as above, of which two wait for both, and the last outcome.
    assert request.num_rounds == 4
    assert request.ended_s == pytest.approx(4 * (PASS_S + GAP_S) + 2 * (ROUND_TRIP_S + 0.0007) + MESSAGE_S + 0.0004)


def test_an_orchestrator_takes_one_message_after_another() -> None:
    clock, ends = Clock(), list[float]()
    orchestrator = SimulatedOrchestrator(clock, constant_machine())
    for seconds in (2.0, 1.0, 3.0):
        orchestrator.handle(seconds, lambda: ends.append(clock.now_s))
    clock.later(10.0, lambda: orchestrator.handle(1.0, lambda: ends.append(clock.now_s)))
    clock.run_until(100.0)
    assert ends == [2.0, 3.0, 6.0, 11.0]


def test_what_follows_from_a_message_comes_before_the_next_one_and_all_of_it_takes_longer_on_shared_cores() -> None:
    clock, ends, asked = Clock(), list[float](), list[float]()
    shared = replace(constant_machine(), contention=Contention(orchestrator_factor=2.0))
    orchestrator = SimulatedOrchestrator(clock, shared)

    def ask() -> None:
        asked.append(clock.now_s + orchestrator.spend(0.5))
        asked.append(clock.now_s + orchestrator.spend(0.25))

    orchestrator.handle(1.0, ask)
    orchestrator.handle(1.0, lambda: ends.append(clock.now_s))
    clock.run_until(100.0)
    assert asked == [3.0, 3.5]
    assert ends == [5.5]
    # Nobody's message is at hand.
    assert orchestrator.spend(0.5) == 1.0
    orchestrator.handle(1.0, lambda: ends.append(clock.now_s))
    clock.run_until(200.0)
    assert ends == [5.5, 103.0]


def test_asking_a_drafter_takes_the_orchestrator_time() -> None:
    costs = OrchestratorCosts(ask_s=0.0002)
    request = one_request("fixed=3", 3, 12, replace(constant_machine(), orchestrator=costs))
    assert request.num_rounds == 4
    assert request.ended_s == pytest.approx(4 * (PASS_S + GAP_S) + 2 * (ROUND_TRIP_S + 0.0002) + MESSAGE_S)


def test_a_draft_goes_on_slowly_while_a_pass_runs_and_at_full_speed_behind_it() -> None:
    machine = replace(constant_machine(), contention=Contention(draft_factor=5.0))
    # Asked for after a message, while the prompt's pass runs: of its 3 ms, 1.8 are done when the pass is over.
    # What of it hangs behind the first token is what the second round, the last one, waits for.
    request = one_request("fixed=3", 3, 3, machine)
    assert request.num_rounds == 2
    left_s = DRAFT_S - (PASS_S - MESSAGE_S) / 5
    assert request.ended_s == pytest.approx(PASS_S + left_s + 2 * MESSAGE_S + PASS_S + GAP_S + MESSAGE_S)


def test_the_next_request_of_a_client_comes_when_it_has_turned_round() -> None:
    machine = replace(constant_machine(), orchestrator=OrchestratorCosts(turnaround_s=0.005))
    chosen = Policy.parse("off")
    deployment = Deployment(chosen.planner(), chosen, machine, Fleet())
    window = ClosedLoad(1, 1.0).run(deployment, Workload((right_trace(0),), 4, 4))
    first, second = window.requests[:2]
    assert first.ended_s is not None
    assert second.opened_s == pytest.approx(first.ended_s + 0.005)


def test_a_request_drafts_from_its_own_context_where_its_prompt_is_known() -> None:
    # The prompt says what the output will, so that only the cache, which reads it, can know.
    said = tuple(range(10, 74))
    trees = (EMPTY_TREE,) * len(said)
    known, unknown = Trace(len(said), said, trees, prompt=said), Trace(len(said), said, trees)
    rounds = {}
    for name, trace in (("known", known), ("unknown", unknown)):
        chosen = Policy.parse("fixed=4")
        deployment = Deployment(chosen.planner(), chosen, constant_machine(), Fleet())
        request = deployment.open(TracedText(trace), len(said), 48)
        deployment.run(100.0)
        assert request.num_tokens == 48
        rounds[name] = request.num_rounds
    assert rounds["unknown"] == 48
    assert rounds["known"] < 30


@pytest.mark.parametrize(
    ("share", "most_s", "more_s"),
    [
        # Drafters that have 4 ms to do, and then nothing.
        (1.0, 0.004, 0.002),
        # Some that are busy for two fifths of the time, also of the time that the pass takes longer for it.
        (0.4, 1.0, PASS_S / (1 - 0.4 * 0.5) - PASS_S),
        (0.0, 1.0, 0.0),
    ],
)
def test_drafters_take_time_from_the_pass_beside_them(share: float, most_s: float, more_s: float) -> None:
    clock, ends = Clock(), list[float]()
    machine = replace(constant_machine(), contention=Contention(pass_per_draft=0.5))
    verifier = SimulatedVerifier(clock, machine, 0, lambda: min(most_s, share * clock.now_s))
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
