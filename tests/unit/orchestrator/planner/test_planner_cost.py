"""What planning itself costs: little, and no more for many requests than for each of them."""

from __future__ import annotations

import random
import statistics
import sys

import pytest

from coppice.core.tree import TokenTree
from orchestrator.planner.adaptive import AdaptivePlanner
from orchestrator.planner.base import RoundContext
from orchestrator.request.rounds import Outcome

NUM_REQUESTS, NUM_NODES = 64, 32
# For each request and pass; `coppice bench overhead` measures what that is in time.
LIMIT_CALLS = 30


def random_tree(rng: random.Random) -> TokenTree:
    parents = tuple(rng.randrange(max(-1, node - 4), node) for node in range(NUM_NODES))
    tree = TokenTree(tuple(range(NUM_NODES)), parents, tuple(-rng.random() / 2 for _ in parents), ("small-lm",))
    # Known before the planner looks: the tree is cut to the output's end by depth.
    assert tree.depth > 0
    return tree


class Calls:
    """Counts calls while it is open: what Python code costs, told by no clock and no neighbour."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> None:
        sys.setprofile(self._seen)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _seen(self, _frame: object, event: str, _argument: object) -> None:
        self.count += event in ("call", "c_call")


def test_a_pass_of_64_requests_with_32_nodes_each_costs_few_calls_for_each_request() -> None:
    now_s = 0.0
    planner = AdaptivePlanner(NUM_NODES, 40_000, clock=lambda: now_s)
    rng = random.Random(3)
    requests = [planner.follow(is_greedy=True) for _ in range(NUM_REQUESTS)]
    round_context = RoundContext(has_drafter=True, row_multiple=4)
    counts = []
    for number in range(60):
        trees = [random_tree(rng) for _ in requests]
        now_s += 0.03
        calls = Calls()
        with calls:
            selected = [request.select(tree) for request, tree in zip(requests, trees, strict=True)]
            for request in requests:
                request.plan(round_context)
        outcomes = [
            Outcome(300 + number, (1, 2), 1, len(tree), tree.depth, 0, b"", 64 * 20, 20_000 + number, 0, 0)
            for tree in selected
        ]
        with calls:
            for request, outcome, tree in zip(requests, outcomes, selected, strict=True):
                request.round_over(outcome, [tree], number % 7 > 0)
        counts.append(calls.count)
    assert statistics.median(counts) / NUM_REQUESTS <= LIMIT_CALLS
    assert max(counts) / NUM_REQUESTS <= 1.5 * LIMIT_CALLS


@pytest.mark.parametrize("num_requests", [1, 24, 64])
def test_one_tree_of_a_pass_is_learned_from_and_everybodys_in_turn(
    num_requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    planner = AdaptivePlanner(NUM_NODES, 40_000, clock=lambda: now_s)
    rng = random.Random(5)
    requests = {planner.follow(is_greedy=True): random_tree(rng) for _ in range(num_requests)}
    learned: list[TokenTree] = []
    monkeypatch.setattr(planner.values, "learn", lambda tree, _: learned.append(tree))
    num_passes = 4 * num_requests
    for number in range(num_passes):
        now_s += 0.03
        for request, tree in requests.items():
            request.plan(RoundContext(has_drafter=True))
            request.tree_arrived()
            outcome = Outcome(9 + number, (1, 2), 1, 32, tree.depth, 0, b"", 999, 20_000 + number, 0, 0)
            request.round_over(outcome, [tree], asked=True)
    assert {id(tree) for tree in learned} == {id(tree) for tree in requests.values()}
    assert len(learned) / num_passes == pytest.approx(1.0, rel=0.3)


def test_nothing_grows_with_the_number_of_requests_and_rounds() -> None:
    now_s = 0.0
    planner = AdaptivePlanner(NUM_NODES, 40_000, clock=lambda: now_s)
    rng = random.Random(4)
    tree = random_tree(rng)

    def size(value: object) -> int:
        """Numbers that a value of ours holds."""
        if isinstance(value, dict):
            return sum(size(item) for item in value.values())
        if isinstance(value, list | tuple | set):
            return sum(size(item) for item in value)
        is_ours = type(value).__module__.startswith("orchestrator") and hasattr(value, "__dict__")
        return 1 + (size(vars(value)) if is_ours else 0)

    sizes = []
    for _ in range(4):
        for number in range(200):
            request = planner.follow(is_greedy=number % 2 == 0)
            for step in range(5):
                now_s += 0.01
                request.plan(RoundContext(has_drafter=True))
                request.tree_arrived()
                request.select(tree)
                request.round_over(Outcome(9, (1, 2), 1, 32, 3, 0, b"", 33, 9000 + step, 0, 0), [tree], True)
            request.close()
        sizes.append(size(planner))
    # A few entries come and go with trials.
    assert max(sizes) - min(sizes) <= 8
