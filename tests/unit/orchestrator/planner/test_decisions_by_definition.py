"""Budgets, lingers and cuts of many rounds, against the same thing worked out node by node and request by request."""

from __future__ import annotations

import math
import random

import pytest

from coppice.core.tree import ROOT, TokenTree
from coppice.lab.bench.overhead.draft_trees import best_first_tree, drawn_path
from orchestrator.planner.adaptive import FLOOR_SHARE, AdaptivePlanner, AdaptiveRequest
from orchestrator.planner.base import RoundContext, RoundPlan
from orchestrator.planner.draft_plans import CLEARLY, SPARE_NODES, STEPS_PER_GAIN, DraftPlans, PlanSnapshot
from orchestrator.request.merge import merge
from orchestrator.request.rounds import Outcome

MAX_NODES, LINGER_US = 24, 40_000
NONE: frozenset[str] = frozenset()


def random_draft(rng: random.Random) -> TokenTree:
    """A tree of one source or of two, in the order of their probabilities or in another one."""
    drafted = best_first_tree(rng, rng.randrange(1, MAX_NODES))
    if rng.random() < 0.5:
        # Depth first, which puts unlikely nodes before likely ones.
        order = sorted(range(len(drafted)), key=drafted.path)
        places = {node: place for place, node in enumerate(order)} | {ROOT: ROOT}
        drafted = TokenTree(
            tuple(drafted.token_ids[node] for node in order),
            tuple(places[drafted.parents[node]] for node in order),
            tuple(drafted.log_probs[node] for node in order),
        )
    if rng.random() < 0.5:
        return drafted.labelled("a")
    return merge([drafted.labelled("a"), best_first_tree(rng, rng.randrange(1, 8)).labelled("b")])


def by_definition(planner: AdaptivePlanner, one: AdaptiveRequest, tree: TokenTree) -> TokenTree:
    """The nodes that are clearly worth their row, and the likeliest where none is but that one nearly so."""
    own = one._weight / planner.weights.mean * one._accepted / one._promised
    logs = planner.values.path_logs(tree)
    kept = [node for node, log in enumerate(logs) if math.exp(log) * own >= CLEARLY * planner.snapshot.price]
    if not kept:
        likeliest = max(range(len(tree)), key=lambda node: (tree.path_log_probs[node], -node))
        kept = [likeliest] if math.exp(logs[likeliest]) >= FLOOR_SHARE * planner.snapshot.price else []
    return tree.select(kept)


@pytest.mark.parametrize("seed", range(3))
def test_every_draft_is_cut_to_the_nodes_that_are_worth_their_row(seed: int) -> None:
    rng = random.Random(seed)
    now_s = 0.0
    planner = AdaptivePlanner(MAX_NODES, LINGER_US, clock=lambda: now_s)
    requests = [planner.follow(is_greedy=True, priority=number % 3) for number in range(12)]
    num_whole = num_cut = num_reordered = 0
    for number in range(60):
        chosen = []
        for one in requests:
            tree = random_draft(rng)
            one.tree_arrived()
            selected = one.select(tree)
            chosen.append(selected)
            if planner.snapshot.price > 0:
                assert selected == by_definition(planner, one, tree)
                num_whole += len(selected) == len(tree)
                num_cut += len(selected) < len(tree)
                num_reordered += selected.token_ids != tree.token_ids[: len(selected)]
        rows = len(requests) + sum(map(len, chosen))
        pass_us = round((20_000 + 250 * rows) * rng.uniform(0.98, 1.04))
        now_s += pass_us / 1e6
        for one, tree in zip(requests, chosen, strict=True):
            path = drawn_path(rng, tree)
            # So that waits are no part of it, everyone has asked in every round.
            outcome = Outcome(300 + number, (*path, 0), len(path), len(tree), tree.depth, 0, b"", rows, pass_us, 0, 0)
            one.round_over(outcome, [tree] if len(tree) else [], asked=True)
            one.plan(RoundContext(has_drafter=True))
    assert min(num_whole, num_cut, num_reordered) > 20


@pytest.mark.parametrize("seed", range(4))
def test_requests_share_plans_that_are_those_of_their_own_gains_rounded_up_to_a_step(seed: int) -> None:
    rng = random.Random(seed)
    snapshot = PlanSnapshot(price=0.12, gain=rng.uniform(0.5, 3), nodes=rng.uniform(1, 9), rate=rng.uniform(200, 5000))
    running = rng.choice([1, 5, 64])
    plans = DraftPlans(snapshot, running, LINGER_US)
    found = set()
    for _ in range(300):
        gain, weight = rng.uniform(0, 4), rng.choice([0.5, 1.0, 2.0])
        plan = plans.plan(gain, weight, MAX_NODES, 1, NONE, is_trial=False, waits=True)

        def exactly(gain: float, weight: float = weight) -> tuple[int, int]:
            linger_s = max(1.0, gain) * snapshot.gain * weight * running / snapshot.rate
            nodes = 1 + math.ceil(SPARE_NODES * max(1.0, gain) * snapshot.nodes) if running > 1 else MAX_NODES
            return min(MAX_NODES, nodes), min(LINGER_US, round(1e6 * linger_s))

        (least_nodes, least_us), (most_nodes, most_us) = exactly(gain), exactly(gain + 1 / STEPS_PER_GAIN)
        assert least_nodes <= plan.max_nodes <= most_nodes
        assert least_us - 1 <= plan.linger_us <= most_us + 1
        assert plan.row_price == snapshot.price / weight
        found.add(id(plan))
    assert len(found) <= 3 * (3 * STEPS_PER_GAIN + 1)


def test_who_tries_asks_for_the_most_nodes_and_who_does_not_wait_lingers_for_nothing() -> None:
    plans = DraftPlans(PlanSnapshot(price=0.1, gain=0.01, nodes=2.0, rate=1000.0), 8, LINGER_US)
    usual = plans.plan(1.0, 1.0, MAX_NODES, 1, NONE, is_trial=False, waits=True)
    assert usual == RoundPlan(4, 80, 1, NONE, 0.1)
    assert plans.plan(1.0, 1.0, MAX_NODES, 1, NONE, is_trial=False, waits=False).linger_us == 0
    # 4 tokens of 8 requests at 1,000 tokens a second.
    assert plans.plan(1.0, 1.0, MAX_NODES, 1, NONE, is_trial=True, waits=True) == RoundPlan(24, 32_000, 1, NONE, 0.1)
