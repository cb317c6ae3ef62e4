"""The tree of marginals is the best of all trees, by enumeration and by the general search."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from coppice.core.tree import TokenTree
from coppice.search.marginal_tree import marginal_tree
from coppice.search.tree_builder import build_tree
from coppice.search.tree_limits import Children, TreeLimits


def random_marginals(seed: int, num_depths: int = 4, vocab: int = 5) -> list[Children]:
    rng = np.random.default_rng(seed)
    marginals = []
    for _ in range(num_depths):
        law = rng.dirichlet(np.full(vocab, 0.7))
        order = np.argsort(-law)
        marginals.append(Children(order.tolist(), np.log(law[order]).tolist()))
    return marginals


def paths(tree: TokenTree) -> dict[tuple[int, ...], float]:
    """Every node's path as tokens, with its probability."""
    return {
        tuple(tree.token_ids[n] for n in tree.path(node)): math.exp(sum(tree.log_probs[n] for n in tree.path(node)))
        for node in range(len(tree))
    }


def all_paths(marginals: list[Children]) -> dict[tuple[int, ...], float]:
    laws = [dict(zip(*children, strict=True)) for children in marginals]
    return {
        tokens: math.exp(sum(law[token] for law, token in zip(laws, tokens, strict=False)))
        for depth in range(1, len(laws) + 1)
        for tokens in itertools.product(*laws[:depth])
    }


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("max_nodes", [1, 2, 7, 40, 1000])
def test_the_tree_has_the_likeliest_of_all_paths(seed: int, max_nodes: int) -> None:
    marginals = random_marginals(seed)
    tree = marginal_tree(marginals, TreeLimits(max_nodes), "x")
    enumerated = all_paths(marginals)
    best = sorted(enumerated.values(), reverse=True)[:max_nodes]
    found = paths(tree)
    assert sorted(found.values(), reverse=True) == pytest.approx(best)
    assert found == pytest.approx({tokens: enumerated[tokens] for tokens in found})
    assert tree.source_names == ("x",)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "limits",
    [
        TreeLimits(20),
        TreeLimits(20, min_path_log_prob=math.log(0.02)),
        TreeLimits(20, min_path_log_prob=math.log(0.05), row_multiple=4),
    ],
    ids=["budget", "floor", "filled rows"],
)
def test_it_is_the_tree_of_the_general_search(seed: int, limits: TreeLimits) -> None:
    marginals = random_marginals(seed)
    general = build_tree(
        marginals[0], lambda f: [marginals[d] if d < 4 else Children((), ()) for d in f.depths], limits, "x"
    )
    assert paths(marginal_tree(marginals, limits, "x")) == pytest.approx(paths(general))


def test_equal_paths_keep_parents_ahead_and_nothing_gives_nothing() -> None:
    sure = [Children([depth], [0.0]) for depth in range(5)]
    assert marginal_tree(sure, TreeLimits(3), "x").parents == (-1, 0, 1)
    assert len(marginal_tree([Children((), ()), *sure], TreeLimits(9), "x")) == 0
    assert len(marginal_tree([], TreeLimits(9), "x")) == 0
