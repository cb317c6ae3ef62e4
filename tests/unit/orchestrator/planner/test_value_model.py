"""What nodes are worth, by what the target accepted."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from coppice.core.tree import TokenTree, chain
from orchestrator.planner.value_model import DEEPEST, FEWEST_IN_ORDER, ValueModel
from orchestrator.request.merge import merge


def drafts(model: ValueModel, source: str, promised: float, true: float, rounds: int, depth: int = 3) -> None:
    """Rounds of a chain whose every node is promised with one probability and right with another."""
    rng = random.Random(7)
    tree = chain(range(1, depth + 1), [math.log(promised)] * depth).labelled(source)
    for _ in range(rounds):
        accepted = 0
        while accepted < depth and rng.random() < true:
            accepted += 1
        model.learn(tree, range(1, accepted + 1))


@pytest.mark.parametrize(("promised", "true"), [(0.9, 0.5), (0.6, 0.8), (0.7, 0.7)])
def test_path_probabilities_become_what_was_accepted_at_their_depth(promised: float, true: float) -> None:
    model = ValueModel()
    drafts(model, "a", promised, true, rounds=1000)
    values = [math.exp(log) for log in model.path_logs(chain([5, 6], [math.log(promised)] * 2).labelled("a"))]
    assert values[0] == pytest.approx(true, rel=0.12)
    # Worth never rises above the parent's correction, so that what is worth its row is always a tree.
    assert values[1] == pytest.approx(min(true**2, promised * values[0]), rel=0.15)


def test_every_source_has_a_correction_of_its_own_and_a_shared_node_the_best_of_them() -> None:
    model = ValueModel()
    drafts(model, "liar", 0.9, 0.1, rounds=400)
    drafts(model, "honest", 0.5, 0.5, rounds=400)
    both = merge([chain([1, 2], [-0.1, -0.1]).labelled("liar"), chain([1, 3], [-0.6, -0.6]).labelled("honest")])
    shared, lied, honest = model.path_logs(both)
    assert math.exp(shared) == pytest.approx(math.exp(-0.1), rel=0.15)
    assert lied < honest
    assert model.worth(both, math.log(0.2)) == [0, 2]


@pytest.mark.parametrize("seed", range(5))
def test_what_is_worth_its_row_is_always_a_tree(seed: int) -> None:
    rng = random.Random(seed)
    model = ValueModel()
    trees = []
    for _ in range(60):
        size = rng.randrange(1, 40)
        parents = tuple(rng.randrange(max(-1, node - 3), node) for node in range(size))
        tree = TokenTree(tuple(range(size)), parents, tuple(-rng.random() for _ in range(size)), ("a",))
        tree = tree.labelled(rng.choice("ab"))
        path = tree.path(rng.randrange(size))
        model.learn(tree, [tree.token_ids[node] for node in path])
        trees.append(tree)
    for tree in [*trees, merge(trees[:3])]:
        for least in (-0.2, -1.0, -3.0):
            kept = model.worth(tree, least)
            by_hand = [node for node, log in enumerate(model.path_logs(tree)) if log >= least]
            assert by_hand == (kept if isinstance(kept, list) else list(range(len(tree))[:kept]))
            tree.select(by_hand)


def test_nodes_at_hand_are_counted_per_tree_from_the_likeliest_down() -> None:
    model = ValueModel()
    assert not model.nodes_at_hand()
    for _ in range(200):
        model.note(chain([1, 2, 3], [math.log(0.9), math.log(0.5), -9.0]).labelled("a"))
    nodes = model.nodes_at_hand()
    assert [value for value, _ in nodes] == sorted((value for value, _ in nodes), reverse=True)
    assert sum(count for _, count in nodes) == pytest.approx(2)
    assert sum(value * count for value, count in nodes) == pytest.approx(0.9 + 0.45, rel=0.05)


def test_nodes_deeper_than_the_deepest_that_is_told_apart_are_learned_with_it() -> None:
    model = ValueModel()
    tree = chain(range(DEEPEST + 20), [-0.01] * (DEEPEST + 20)).labelled("a")
    for _ in range(200):
        model.learn(tree, ())
    logs = model.path_logs(tree)
    assert logs == sorted(logs, reverse=True)
    assert logs[-1] < -1


def test_a_walk_ends_early_only_where_many_trees_in_a_row_came_in_order() -> None:
    values = ValueModel()
    in_order = TokenTree((1, 2, 3), (-1, -1, -1), (-0.2, -2.0, -2.5), ("a",))
    # As likely a node as the first comes last.
    another = TokenTree((1, 2, 3), (-1, -1, -1), (-0.2, -2.0, -0.25), ("a",))
    for _ in range(FEWEST_IN_ORDER - 1):
        values.note(in_order)
    assert values.worth(another, -1.0) == [0, 2]
    values = ValueModel()
    for _ in range(FEWEST_IN_ORDER):
        values.note(in_order)
    assert values.worth(in_order, -1.0) == 1
    assert values.worth(another, -1.0) == 1
    # Once one is seen in another order, and with other sources, nodes are looked at to the last again.
    assert values.worth(replace(another, source_names=("b",)), -1.0) == [0, 2]
    values.note(another)
    assert values.worth(another, -1.0) == [0, 2]
