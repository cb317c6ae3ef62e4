"""The budget over all requests, against every selection of nodes that there is."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from orchestrator.planner.budget import best_budget, worthwhile_linger_s


def random_trees(rng: random.Random, num_trees: int, num_nodes: int) -> list[tuple[list[int], list[float]]]:
    """Parents and path probabilities; a node is never likelier than its parent."""
    trees = []
    for _ in range(num_trees):
        parents = [rng.randrange(-1, node) for node in range(num_nodes)]
        paths: list[float] = []
        for parent in parents:
            paths.append((paths[parent] if parent >= 0 else 1.0) * rng.uniform(0.2, 0.95))
        trees.append((parents, paths))
    return trees


def best_by_trying_all(trees: list[tuple[list[int], list[float]]], time_s: float, row_s: float) -> float:
    """The highest rate of all selections that are trees."""
    best = 0.0
    choices = []
    for parents, paths in trees:
        of_tree = []
        for kept in itertools.product([False, True], repeat=len(parents)):
            if all(parents[node] < 0 or kept[parents[node]] for node in range(len(parents)) if kept[node]):
                of_tree.append((sum(kept), sum(path for path, keep in zip(paths, kept, strict=True) if keep)))
        choices.append(of_tree)
    for chosen in itertools.product(*choices):
        rows, gain = sum(rows for rows, _ in chosen), sum(gain for _, gain in chosen)
        best = max(best, (len(trees) + gain) / (time_s + row_s * rows))
    return best


@pytest.mark.parametrize("seed", range(12))
def test_no_selection_of_nodes_gives_more_tokens_per_second(seed: int) -> None:
    rng = random.Random(seed)
    trees = random_trees(rng, num_trees=3, num_nodes=4)
    time_s, row_s = rng.uniform(1, 10), rng.choice([0.05, 0.3, 1.0, 3.0])
    paths = sorted((path for _, paths in trees for path in paths), reverse=True)
    budget = best_budget(((path, 1) for path in paths), len(trees), time_s, row_s)
    assert budget.rate == pytest.approx(best_by_trying_all(trees, time_s, row_s))
    # Whoever knows the price selects the same nodes alone.
    selected = [path for path in paths if path >= budget.price]
    assert (len(selected), sum(selected)) == (budget.rows, pytest.approx(budget.gain))


def test_rows_that_cost_nothing_are_all_taken_and_dear_ones_not_at_all() -> None:
    nodes = [(0.9, 3.0), (0.5, 2.0), (0.01, 7.0)]
    assert best_budget(nodes, 1, 0.005, 0.0).rows == 12
    assert best_budget(nodes, 1, 0.005, 0.005).rows == 0
    assert best_budget(nodes, 1, 0.005, 0.0, max_rows=4).gain == pytest.approx(3.2)


def test_the_budget_falls_smoothly_to_nothing_as_more_requests_run() -> None:
    """Fixed cost of a pass is shared by all; the price of a row rises until a row gives less than a round."""
    nodes = [(math.exp(-depth / 10), 1.0) for depth in range(1, 40)]
    rows = []
    for running in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        shared = [(value, running * count) for value, count in nodes]
        rows.append(best_budget(shared, running, 0.005 + 0.0002 * running, 0.0002).rows / running)
    assert rows == sorted(rows, reverse=True)
    assert rows[0] >= 15
    assert rows[-1] < 2


def test_a_draft_is_waited_for_as_long_as_the_tokens_per_second_do_not_fall() -> None:
    gain, pass_s = 3.0, 0.005
    for wait_s in (0.001, 0.008, 0.014, 0.016, 0.03):
        rate = (1 + gain) / (wait_s + pass_s)
        assert (wait_s <= worthwhile_linger_s(gain, rate, 1)) == (rate >= 1 / pass_s)
