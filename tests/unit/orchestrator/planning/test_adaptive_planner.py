"""The adaptive planner in a model of verifier, drafter and load, beside no speculation and fixed trees."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from orchestrator.planner import FixedPlanner, Planner
from orchestrator.planning.adaptive import AdaptivePlanner
from tests.unit.orchestrator.planning.modelled_deployment import Deployment, Machine, Text

MAX_NODES, LINGER_US = 15, 40_000
TEXTS = {"repetitive": Text(), "surprising": Text(first=0.65, second=0.1)}
# A drafter that is wrong nearly always, and says so of itself or not.
HOPELESS = {"honest": Text(first=0.1, second=0.05), "sure of itself": Text(first=0.1, second=0.05, confidence=0.2)}


def fixed(max_nodes: int, mode: str, text: Text) -> Deployment:
    return Deployment(lambda clock: FixedPlanner(max_nodes, LINGER_US), mode, text=text)


def adaptive(text: Text, seed: int = 0, machine: Machine | None = None) -> Deployment:
    def planner(clock: Callable[[], float]) -> Planner:
        return AdaptivePlanner(MAX_NODES, LINGER_US, clock=clock)

    return Deployment(planner, machine=machine or Machine(), text=text, seed=seed)


def settled_rate(deployment: Deployment, num_requests: int) -> float:
    """Tokens per second of four seconds, after two in which it may settle."""
    deployment.set_load(num_requests)
    deployment.run(2.0)
    return deployment.run(4.0)


@pytest.mark.parametrize("num_requests", [1, 2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("text", TEXTS)
def test_it_is_never_slower_than_off_and_hardly_slower_than_the_best_fixed_tree(num_requests: int, text: str) -> None:
    off = settled_rate(fixed(0, "off", TEXTS[text]), num_requests)
    trees = [settled_rate(fixed(nodes, "forced", TEXTS[text]), num_requests) for nodes in (3, 7, 15)]
    planned = settled_rate(adaptive(TEXTS[text]), num_requests)
    assert planned >= 0.97 * off
    # Two requests gain so little here, 1.2 x off, that six seconds are not always enough to see it.
    share = 0.8 if (num_requests, text) == (2, "surprising") else 0.92
    assert planned >= share * max(trees)


@pytest.mark.parametrize("seed", range(3))
def test_a_step_from_one_request_to_many_and_back_settles_within_two_seconds(seed: int) -> None:
    text = TEXTS["repetitive"]
    off_at_64 = settled_rate(fixed(0, "off", text), 64)
    alone = settled_rate(fixed(MAX_NODES, "forced", text), 1)
    deployment = adaptive(text, seed)
    settled_rate(deployment, 1)
    deployment.set_load(64)
    # Never a collapse on the way either.
    assert deployment.run(2.0) >= 0.7 * off_at_64
    assert deployment.run(2.0) >= 0.97 * off_at_64
    deployment.set_load(1)
    assert deployment.run(2.0) >= 0.7 * alone
    assert deployment.run(4.0) >= 0.92 * alone


@pytest.mark.parametrize("text", HOPELESS)
@pytest.mark.parametrize("num_requests", [1, 8])
def test_where_drafts_are_worth_nothing_drafting_ends_and_its_trials_cost_little(text: str, num_requests: int) -> None:
    off = settled_rate(fixed(0, "off", HOPELESS[text]), num_requests)
    deployment = adaptive(HOPELESS[text])
    assert settled_rate(deployment, num_requests) >= 0.97 * off
    asked = deployment.asked_rounds
    rounds = deployment.rounds
    deployment.run(10.0)
    # Most of these are rounds in which drafters only catch up, and that wait for nothing.
    assert deployment.asked_rounds - asked <= 0.1 * (deployment.rounds - rounds)


def test_drafting_comes_back_when_the_text_becomes_predictable() -> None:
    deployment = adaptive(HOPELESS["honest"])
    settled_rate(deployment, 2)
    deployment.set_load(0)
    deployment.set_load(2, TEXTS["repetitive"])
    deployment.run(30.0)
    best = settled_rate(fixed(MAX_NODES, "forced", TEXTS["repetitive"]), 2)
    assert deployment.run(8.0) >= 0.9 * best


@pytest.mark.parametrize("num_requests", [1, 4])
def test_passes_sixty_times_slower_do_no_lasting_harm(num_requests: int) -> None:
    text = TEXTS["repetitive"]
    usual, hit = adaptive(text), adaptive(text)
    hit.slow_passes = dict.fromkeys((60, 61, 100), 60.0)
    for deployment in (usual, hit):
        deployment.set_load(num_requests)
        deployment.run(6.0)
    assert max(hit.slow_passes) < hit.passes
    assert hit.run(6.0) >= 0.9 * usual.run(6.0)


def test_slow_passes_do_not_bring_drafting_back_where_it_does_not_pay() -> None:
    hit = adaptive(TEXTS["repetitive"])
    hit.slow_passes = dict.fromkeys((60, 61, 100), 60.0)
    hit.set_load(32)
    hit.run(6.0)
    assert max(hit.slow_passes) < hit.passes
    assert hit.run(6.0) >= 0.95 * settled_rate(fixed(0, "off", TEXTS["repetitive"]), 32)


def test_one_request_that_is_hard_to_guess_does_not_keep_the_others_from_drafting() -> None:
    deployment = adaptive(TEXTS["repetitive"])
    deployment.set_load(1)
    deployment.set_load(2, HOPELESS["honest"])
    deployment.run(4.0)
    easy, hard = deployment.requests
    before = (easy.num_rounds, hard.num_rounds, easy.length, hard.length)
    deployment.run(4.0)
    assert (easy.length - before[2]) / (easy.num_rounds - before[0]) > 4
    assert (hard.length - before[3]) / (hard.num_rounds - before[1]) < 1.5


def test_the_same_seed_makes_the_same_plans() -> None:
    runs = []
    for _ in range(2):
        deployment = adaptive(TEXTS["surprising"])
        deployment.set_load(4)
        deployment.run(5.0)
        runs.append((deployment.tokens, deployment.passes, deployment.rows, deployment.asked_rounds))
    assert runs[0] == runs[1]


def test_nothing_is_left_of_requests_that_have_ended() -> None:
    deployment = adaptive(TEXTS["repetitive"])
    for num_requests in (3, 40, 7, 20, 0):
        deployment.set_load(num_requests)
        deployment.run(0.4)
    planner = deployment.planner
    assert isinstance(planner, AdaptivePlanner)
    assert (planner.num_running, planner.num_newcomers) == (0, 0)
