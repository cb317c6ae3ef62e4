"""The compiled search against the one in steps, and against what must hold of any best tree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from coppice.core.tree import TokenTree
from coppice.search.likeliest_tokens import FloatArray, top_children
from coppice.search.transition_scores import TransitionScores
from coppice.search.transition_tree import transition_tree
from coppice.search.tree_builder import Frontier, build_tree
from coppice.search.tree_limits import Children, TreeLimits

VOCAB, RANK = 40, 3


def known(seed: int, depths: int) -> tuple[TransitionScores, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    transition = TransitionScores(*rng.normal(0, 1, (2, VOCAB, RANK)).astype(np.float32))
    scores = rng.normal(0, 2, (depths, VOCAB)).astype(np.float32)
    # Some tokens are excluded.
    scores[rng.random(scores.shape) < 0.2] = -np.inf
    return transition, scores, rng.uniform(0.5, 1.5, depths).astype(np.float32)


def paths(tree: TokenTree) -> dict[tuple[int, ...], float]:
    return dict(zip(tree.paths(), tree.path_log_probs, strict=True))


def library_tree(
    root: Children | int,
    transition: TransitionScores,
    scores: FloatArray,
    sigmas: FloatArray,
    limits: TreeLimits,
    max_children: int,
    source: str,
) -> TokenTree:
    """`transition_tree` in steps."""

    def children_of(token_ids: Sequence[int], depths: Sequence[int]) -> list[Children]:
        return top_children(transition.behind(token_ids, scores, depths, sigmas), np.float32(1), max_children)

    first_depth = 0 if isinstance(root, Children) else 1

    def expand(frontier: Frontier) -> list[Children]:
        return children_of(frontier.token_ids, [depth - 1 + first_depth for depth in frontier.depths])

    children = root if isinstance(root, Children) else children_of([root], [0])[0]
    depths = replace(limits, max_depth=len(scores) + 1 - first_depth)
    return build_tree(children, expand, depths, source)


@pytest.mark.parametrize("given", [False, True], ids=["behind a token", "children given"])
@pytest.mark.parametrize("depths", [1, 2, 4])
def test_the_compiled_search_finds_the_nodes_that_the_one_in_steps_finds(given: bool, depths: int) -> None:
    sizes = set()
    for seed in range(40):
        transition, scores, sigmas = known(seed, depths)
        limits = TreeLimits(
            max_nodes=1 + seed % 13,
            min_path_log_prob=[-math.inf, math.log(0.1), math.log(0.01)][seed % 3],
            row_multiple=[1, 4][seed % 2],
        )
        root: Children | int = 7
        if given:
            (root,) = top_children(scores[:1], np.float32(1), 6)
            scores, sigmas = scores[1:], sigmas[1:]
        arguments = (root, transition, scores, sigmas, limits, 6, "x")
        tree = transition_tree(*arguments)
        expected = library_tree(*arguments)
        assert paths(tree) == pytest.approx(paths(expected), abs=1e-5)
        assert tree.source_names == ("x",)
        # Likeliest first, so that the first few are the best few.
        assert list(tree.path_log_probs) == sorted(tree.path_log_probs, reverse=True)
        assert tree.depth <= depths
        sizes.add(len(tree))
    assert len(sizes) > 4


def test_nothing_is_expanded_that_cannot_give_one_of_the_best() -> None:
    """A tree of one node is the likeliest child, and one whose nodes must be certain is empty."""
    transition, scores, sigmas = known(3, 3)
    only = transition_tree(5, transition, scores, sigmas, TreeLimits(1), 4, "x")
    assert only.parents == (-1,)
    (best,) = top_children(transition.behind([5], scores, [0], sigmas), np.float32(1), 1)
    assert only.token_ids == tuple(best.token_ids)
    certain = TreeLimits(9, min_path_log_prob=math.log(0.9999))
    assert len(transition_tree(5, transition, scores, sigmas, certain, 4, "x")) == 0
    nothing = np.full_like(scores, -np.inf)
    assert len(transition_tree(5, transition, nothing, sigmas, TreeLimits(9), 4, "x")) == 0
