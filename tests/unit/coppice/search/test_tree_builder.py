"""The best-first search against the obvious enumeration of everything."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coppice.core.tree import ROOT, TokenTree
from coppice.search.tree_builder import Frontier, build_tree
from coppice.search.tree_limits import Children, TreeLimits

BRANCHES = 3
DEPTH = 5

limits_strategy = st.builds(
    TreeLimits,
    max_nodes=st.integers(1, 24),
    width=st.integers(1, 6),
    max_steps=st.integers(0, 8),
    max_depth=st.integers(1, 6),
    min_step_gain=st.floats(0, 0.9),
)


class RandomLanguage:
    """Children of any path, as a pure function of (seed, path); notes what is asked of it."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._paths: list[tuple[int, ...]] = []
        self.frontiers: list[Frontier] = []

    @functools.cache  # noqa: B019  lives as long as the test
    def children(self, path: tuple[int, ...]) -> Children:
        rng = random.Random(f"{self._seed} {path}")
        weights = sorted((rng.expovariate(1) ** 2 for _ in range(BRANCHES + 1)), reverse=True)
        tokens = rng.sample(range(10), BRANCHES)
        return Children(tokens, [math.log(weight / sum(weights)) for weight in weights[:BRANCHES]])

    def expand(self, frontier: Frontier) -> Sequence[Children]:
        self.frontiers.append(frontier)
        paths = [
            (*(self._paths[row] if row != ROOT else ()), token)
            for token, row in zip(frontier.token_ids, frontier.parent_rows, strict=True)
        ]
        assert [len(path) for path in paths] == frontier.depths
        self._paths.extend(paths)
        return [self.children(path) for path in paths]


def search(seed: int, limits: TreeLimits) -> tuple[TokenTree, RandomLanguage]:
    language = RandomLanguage(seed)
    return build_tree(language.children(()), language.expand, limits, "test"), language


def enumerate_best(seed: int, max_nodes: int, max_depth: int) -> list[tuple[float, tuple[int, ...]]]:
    """The best paths of all, by walking every path up to a depth."""
    language = RandomLanguage(seed)
    everything: list[tuple[float, tuple[int, ...]]] = []

    def walk(path: tuple[int, ...], value: float) -> None:
        if len(path) == max_depth:
            return
        for token, log_prob in zip(*language.children(path), strict=True):
            everything.append((value + log_prob, (*path, token)))
            walk((*path, token), value + log_prob)

    walk((), 0.0)
    return sorted(everything, reverse=True)[:max_nodes]


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10_000), max_nodes=st.integers(1, 20), width=st.integers(1, 5))
def test_a_search_without_a_step_limit_finds_the_best_nodes_of_all(seed: int, max_nodes: int, width: int) -> None:
    tree, _ = search(seed, TreeLimits(max_nodes, width, max_depth=DEPTH))
    found = sorted(zip(tree.path_log_probs, tree.paths(), strict=True), reverse=True)
    expected = enumerate_best(seed, max_nodes, DEPTH)
    assert [path for _, path in found] == [path for _, path in expected]
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected])


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10_000), limits=limits_strategy)
def test_a_search_stays_within_its_limits(seed: int, limits: TreeLimits) -> None:
    tree, language = search(seed, limits)
    assert 1 <= len(tree) <= limits.max_nodes
    assert tree.depth <= min(limits.max_depth, limits.max_steps + 1)
    assert len(language.frontiers) <= limits.max_steps
    for frontier in language.frontiers:
        assert 1 <= len(frontier.token_ids) <= limits.width


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10_000), limits=limits_strategy)
def test_a_smaller_budget_gives_the_best_part_of_a_larger_tree(seed: int, limits: TreeLimits) -> None:
    unlimited = TreeLimits(limits.max_nodes, max_depth=4)
    larger, _ = search(seed, TreeLimits(limits.max_nodes + 7, max_depth=4))
    smaller, _ = search(seed, unlimited)
    assert set(smaller.paths()) == set(larger.prune(limits.max_nodes).paths())


def test_certain_tokens_make_a_chain_and_stop_the_search_when_it_is_full() -> None:
    calls: list[Frontier] = []

    def expand(frontier: Frontier) -> Sequence[Children]:
        calls.append(frontier)
        return [Children([depth], [0.0]) for depth in frontier.depths]

    tree = build_tree(Children([0], [0.0]), expand, TreeLimits(5), "test")
    assert tree.token_ids == (0, 1, 2, 3, 4)
    assert tree.parents == (-1, 0, 1, 2, 3)
    assert len(calls) == 4


def test_no_step_is_taken_that_promises_too_little() -> None:
    def expand(frontier: Frontier) -> Sequence[Children]:
        raise AssertionError("not worth a step")

    root = Children([4, 2], [math.log(0.04), math.log(0.03)])
    tree = build_tree(root, expand, TreeLimits(8, min_step_gain=0.08), "test")
    assert tree.token_ids == (4, 2)
    assert tree.source_names == ("test",)


def test_nodes_that_are_too_unlikely_are_left_out() -> None:
    root = Children([4, 2, 3], [math.log(0.6), math.log(0.3), math.log(0.05)])
    behind = Children([7, 8], [math.log(0.4), math.log(0.2)])
    limits = TreeLimits(8, max_steps=1, min_path_log_prob=math.log(0.1))
    tree = build_tree(root, lambda frontier: [behind] * len(frontier.token_ids), limits, "test")
    assert tree.prune(99).token_ids == (4, 2, 7, 8, 7)
    assert min(tree.path_log_probs) >= math.log(0.1)


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10_000), multiple=st.integers(2, 8), max_nodes=st.integers(1, 30))
def test_only_what_would_be_padding_is_filled_with_unlikely_nodes(seed: int, multiple: int, max_nodes: int) -> None:
    limits = TreeLimits(max_nodes, max_depth=DEPTH, min_path_log_prob=math.log(0.06))
    strict, asked = search(seed, limits)
    filled, asked_for_filled = search(seed, replace(limits, row_multiple=multiple))
    padded = -(-(1 + len(strict)) // multiple) * multiple - 1
    assert len(strict) <= len(filled) <= min(padded, max_nodes)
    assert set(strict.paths()) <= set(filled.paths())
    # Neither more passes nor others.
    assert asked_for_filled.frontiers == asked.frontiers
    # The rest are the best of what was seen and is not hopeless.
    children = {
        (*path, token): value + log_prob
        for path, value in [((), 0.0), *zip(strict.paths(), strict.path_log_probs, strict=True)]
        if len(path) < DEPTH
        for token, log_prob in zip(*asked.children(path), strict=True)
    }
    seen = sorted(value for value in children.values() if value >= math.log(0.06 / 4))
    assert sorted(filled.path_log_probs) == pytest.approx(seen[len(seen) - len(filled) :])
    assert len(filled) == min(padded, max_nodes, len(seen))


def test_a_tree_that_nothing_is_worth_a_row_of_still_fills_the_root_s() -> None:
    root = Children([4, 2, 3, 5], [math.log(0.07), math.log(0.05), math.log(0.04), math.log(0.03)])
    limits = TreeLimits(8, max_steps=4, min_path_log_prob=math.log(0.1), row_multiple=4)
    tree = build_tree(root, lambda frontier: [], limits, "test")
    assert tree.token_ids == (4, 2, 3)


def test_a_root_without_children_gives_the_empty_tree() -> None:
    assert len(build_tree(Children([], []), lambda frontier: [], TreeLimits(8), "test")) == 0
