"""Values of nodes: drafters that promise too much or too little, and selections by definition."""

from __future__ import annotations

import math
import random

import pytest

from coppice.core.tree import ROOT, TokenTree, chain
from coppice.lab.bench.overhead.draft_trees import best_first_tree
from orchestrator.planner.node_values import FEWEST_IN_ORDER, NodeValues
from orchestrator.request.merge import merge

DEPTH = 6


def teach(values: NodeValues, says: float, right: float, source: str = "a", rounds: int = 1500, seed: int = 0) -> None:
    """Chains whose tokens are right with one probability and said to be with another."""
    rng = random.Random(seed)
    tree = chain(list(range(1, DEPTH + 1)), [math.log(says)] * DEPTH).labelled(source)
    for _ in range(rounds):
        num_right = next((depth for depth in range(DEPTH) if rng.random() >= right), DEPTH)
        values.learn(tree, (*range(1, num_right + 1), 0))


@pytest.mark.parametrize(("says", "right"), [(0.9, 0.9), (0.9, 0.6), (0.6, 0.8)])
def test_what_a_drafter_says_is_turned_into_how_often_it_is_right(says: float, right: float) -> None:
    values = NodeValues()
    teach(values, says, right)
    assert says ** values.exponent(("a",)) == pytest.approx(right, abs=0.06)


def test_each_drafter_is_judged_by_its_own_guesses() -> None:
    values = NodeValues()
    teach(values, 0.9, 0.5, "loud")
    teach(values, 0.8, 0.8, "honest")
    names = ("loud", "honest")
    assert values.exponent(names, 0b01) > 2
    assert values.exponent(names, 0b10) == pytest.approx(1.0, abs=0.3)
    # Of what both say, the more credible counts.
    assert values.exponent(names, 0b11) == values.exponent(names, 0b10)


def random_draft(rng: random.Random) -> TokenTree:
    """A tree of one source or of two, in the order of their probabilities or in another one."""
    drafted = best_first_tree(rng, rng.randrange(1, 24))
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


def by_definition(values: NodeValues, tree: TokenTree, least: float) -> TokenTree:
    """Nodes whose product of powers along the path is at least `least`."""
    powers = [
        math.exp(log) ** values.exponent(tree.source_names, tree.sources[node] if tree.sources else -1)
        for node, log in enumerate(tree.log_probs)
    ]
    return tree.select(node for node in range(len(tree)) if math.prod(powers[at] for at in tree.path(node)) >= least)


@pytest.mark.parametrize("seed", range(3))
def test_the_nodes_above_a_price_are_kept(seed: int) -> None:
    rng = random.Random(seed)
    values = NodeValues()
    teach(values, 0.9, 0.6, "a", rounds=200)
    teach(values, 0.7, 0.8, "b", rounds=200)
    num_whole = num_cut = num_reordered = 0
    for _ in range(300):
        tree, least = random_draft(rng), rng.uniform(0.01, 0.5)
        values.learn(tree, tree.token_ids[:2])
        kept = values.worth(tree, math.log(least))
        assert kept == by_definition(values, tree, least)
        num_whole += len(kept) == len(tree)
        num_cut += len(kept) < len(tree)
        num_reordered += kept.token_ids != tree.token_ids[: len(kept)]
    assert min(num_whole, num_cut, num_reordered) > 10


def test_after_many_ordered_trees_the_first_node_below_the_price_is_the_end() -> None:
    rng = random.Random(7)
    values = NodeValues()
    for _ in range(FEWEST_IN_ORDER + 50):
        tree = best_first_tree(rng, 20).labelled("a")
        assert values.worth(tree, math.log(0.1)) == by_definition(values, tree, 0.1)
        values.learn(tree, ())
    # One that is not ordered ends that.
    shuffled = TokenTree((1, 2), (ROOT, ROOT), (math.log(0.05), math.log(0.9)), ("a",))
    values.learn(shuffled, (2,))
    assert values.worth(shuffled, math.log(0.3)).token_ids == (2,)
