"""Token trees: valid by construction, and every operation keeps them so."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coppice.core.draft_distribution import DraftDistribution
from coppice.core.errors import InvalidTreeError
from coppice.core.sampled_tree import SampledTree
from coppice.core.tree import EMPTY_TREE, ROOT, TokenTree, chain
from coppice.v1 import tree_pb2
from coppice.wire.convert import tree_from_proto, tree_to_proto

LOG_PROBS = st.floats(min_value=-20, max_value=0, width=32)


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 24) -> TokenTree:
    """Any valid tree, with or without source masks."""
    count = draw(st.integers(0, max_nodes))
    parents = [draw(st.integers(ROOT, node - 1)) for node in range(count)]
    # Siblings differ because every node carries its own index times a constant, plus a little.
    tokens = [draw(st.integers(0, 2)) + 3 * node for node in range(count)]
    log_probs = [draw(LOG_PROBS) for _ in range(count)]
    names = draw(st.sampled_from([(), ("small-lm",), ("small-lm", "cache", "semi-ar")]))
    masked = bool(names) and bool(count) and draw(st.booleans())
    sources = [draw(st.integers(0, 2 ** len(names) - 1)) for _ in range(count)] if masked else []
    return TokenTree(tuple(tokens), tuple(parents), tuple(log_probs), names, tuple(sources))


def is_closed(tree: TokenTree, nodes: set[int]) -> bool:
    return all(tree.parents[node] in nodes | {ROOT} for node in nodes)


@given(trees())
def test_derived_values_agree_with_walking_up_from_each_node(tree: TokenTree) -> None:
    for node in range(len(tree)):
        path = tree.path(node)
        assert path[-1] == node
        assert tree.parents[path[0]] == ROOT
        assert list(path) == sorted(path)
        assert tree.depths[node] == len(path)
        assert tree.path_log_probs[node] == pytest.approx(math.fsum(tree.log_probs[step] for step in path))
        assert tree.children[tree.parents[node], tree.token_ids[node]] == node
    assert tree.depth == max([0, *tree.depths])
    assert len(tree.children) == len(tree)


@given(trees(), st.data())
def test_selecting_an_ancestor_closed_set_keeps_exactly_its_paths(tree: TokenTree, data: st.DataObject) -> None:
    leaves = data.draw(st.sets(st.sampled_from(range(len(tree))))) if len(tree) else set()
    nodes = {step for leaf in leaves for step in tree.path(leaf)}
    selected = tree.select(nodes)
    paths = list(tree.paths())
    assert list(selected.paths()) == [paths[node] for node in sorted(nodes)]
    assert [selected.sources_of(new) for new in range(len(selected))] == [tree.sources_of(old) for old in sorted(nodes)]
    assert tree.take(sorted(nodes)) == selected


@given(trees(), st.data())
def test_selecting_a_node_without_its_parent_is_refused(tree: TokenTree, data: st.DataObject) -> None:
    nodes = data.draw(st.sets(st.sampled_from(range(len(tree))))) if len(tree) else set()
    if is_closed(tree, nodes):
        tree.select(nodes)
    else:
        with pytest.raises(InvalidTreeError, match="not selected"):
            tree.select(nodes)


@pytest.mark.parametrize("nodes", [[-1], [0, 2], [5]])
def test_selecting_a_node_that_does_not_exist_is_refused(nodes: list[int]) -> None:
    with pytest.raises(InvalidTreeError, match="tree's 2"):
        chain([1, 2]).select(nodes)


@given(trees(max_nodes=9), st.integers(0, 10))
def test_pruning_keeps_the_closed_set_with_the_largest_sum_of_path_probabilities(
    tree: TokenTree, max_nodes: int
) -> None:
    pruned = tree.prune(max_nodes)
    assert len(pruned) == min(len(tree), max_nodes)
    best = max(
        math.fsum(math.exp(tree.path_log_probs[node]) for node in nodes)
        for nodes in itertools.combinations(range(len(tree)), len(pruned))
        if is_closed(tree, set(nodes))
    )
    assert math.fsum(map(math.exp, pruned.path_log_probs)) == pytest.approx(best, rel=1e-9)
    assert set(pruned.paths()) <= set(tree.paths())


def test_pruning_to_fewer_than_no_nodes_leaves_the_empty_tree() -> None:
    assert len(chain([1, 2, 3]).prune(-1)) == 0


def test_pruning_prefers_the_parent_when_a_child_is_certain() -> None:
    tree = TokenTree((1, 2, 3), (ROOT, 0, ROOT), (-1.0, 0.0, -1.0))
    assert tree.prune(1).token_ids == (1,)
    assert tree.prune(2).token_ids == (1, 2)


@given(trees())
def test_a_tree_survives_the_wire(tree: TokenTree) -> None:
    message = tree_pb2.TokenTree.FromString(tree_to_proto(tree).SerializeToString())
    assert tree_from_proto(message) == tree


@pytest.mark.parametrize(
    ("arrays", "complaint"),
    [
        ({"token_ids": (1, 2), "parents": (ROOT,)}, "2 token ids, 1 parents"),
        ({"token_ids": (), "parents": (), "log_probs": (-1.0,)}, "0 token ids"),
        ({"parents": (0, ROOT)}, "node 0 names parent 0"),
        ({"parents": (ROOT, 1)}, "node 1 names parent 1"),
        ({"parents": (1, ROOT)}, "node 0 names parent 1"),
        ({"parents": (ROOT, -2)}, "node 1 names parent -2"),
        ({"parents": (ROOT, ROOT), "token_ids": (5, 5)}, "repeats token 5"),
        ({"log_probs": (-0.5, 0.1)}, "node 1 has log-probability 0.1"),
        ({"log_probs": (-0.5, math.nan)}, "log-probability nan"),
        ({"log_probs": (-math.inf, -0.5)}, "log-probability -inf"),
        ({"sources": (1,), "source_names": ("a",)}, "1 source masks"),
        ({"sources": (1, 2), "source_names": ("a",)}, "unknown source"),
        ({"sources": (1, -1), "source_names": ("a",)}, "unknown source"),
    ],
)
def test_an_invalid_tree_cannot_be_built(arrays: dict[str, Any], complaint: str) -> None:
    valid: dict[str, Any] = {"token_ids": (5, 6), "parents": (ROOT, 0), "log_probs": (-0.5, -0.5)}
    TokenTree(**valid)
    with pytest.raises(InvalidTreeError, match=complaint) as caught:
        TokenTree(**{**valid, **arrays})
    assert caught.value.field == "tree"


def test_a_message_without_log_probabilities_counts_them_as_zero() -> None:
    tree = tree_from_proto(tree_pb2.TokenTree(token_ids=[4, 5], parents=[-1, 0]))
    assert tree == chain([4, 5])


def test_a_message_with_log_probabilities_but_no_tokens_is_refused() -> None:
    with pytest.raises(InvalidTreeError):
        tree_from_proto(tree_pb2.TokenTree(log_probs=[-1.0]))


def test_the_empty_message_is_the_empty_tree() -> None:
    assert tree_from_proto(tree_pb2.TokenTree()) == EMPTY_TREE
    assert EMPTY_TREE.depth == 0


def test_a_round_of_64_nodes_from_several_sources_costs_at_most_2_kb() -> None:
    tree = TokenTree(
        token_ids=tuple(range(130_000, 130_064)),
        parents=tuple(node // 2 - 1 if node else ROOT for node in range(64)),
        log_probs=tuple(-0.1 * node for node in range(64)),
        source_names=("small-lm", "semi-ar", "diffusion", "cache"),
        sources=tuple(node % 16 for node in range(64)),
    )
    assert tree_to_proto(tree).ByteSize() <= 2048


def test_a_chain_is_one_path() -> None:
    tree = chain([7, 8, 9], [-0.1, -0.2, -0.3])
    assert list(tree.paths()) == [(7,), (7, 8), (7, 8, 9)]
    assert tree.sources_of(2) == ()


def test_descending_leaves_what_hangs_behind_the_tokens() -> None:
    tree = TokenTree((5, 6, 7, 8, 9), (-1, 0, 0, 1, -1), (-0.1, -0.2, -0.3, -0.4, -0.5))
    assert list(tree.descend([5]).paths()) == [(6,), (7,), (6, 8)]
    assert tree.descend([5]).log_probs == (-0.2, -0.3, -0.4)
    assert list(tree.descend([5, 6]).paths()) == [(8,)]
    assert len(tree.descend([5, 6, 8])) == 0
    assert len(tree.descend([5, 9])) == 0
    assert tree.descend([]) is tree


def test_expected_tokens_add_up_path_probabilities() -> None:
    tree = TokenTree((5, 6, 7), (-1, 0, -1), (math.log(0.5), math.log(0.4), math.log(0.25)))
    assert tree.expected_tokens == pytest.approx(0.5 + 0.2 + 0.25)


@given(trees(), st.integers(0, 6))
def test_a_depth_limit_keeps_exactly_the_shallower_paths(tree: TokenTree, depth: int) -> None:
    assert set(tree.up_to_depth(depth).paths()) == {path for path in tree.paths() if len(path) <= depth}


WIDE, NARROW = DraftDistribution((5, 6, 7), (1.0, 2.0, 0.5)), DraftDistribution((8, 9), (0.25, 1.0))
SAMPLED = SampledTree((7, 5, 8, 9), (ROOT, ROOT, 0, 2), (WIDE, NARROW, None, NARROW, None)).token_tree("small-lm")


def test_a_sampled_tree_survives_the_wire() -> None:
    message = tree_pb2.TokenTree.FromString(tree_to_proto(SAMPLED).SerializeToString())
    tree = tree_from_proto(message)
    assert tree.distributions == SAMPLED.distributions
    assert (tree.token_ids, tree.parents, tree.source_names) == (SAMPLED.token_ids, SAMPLED.parents, ("small-lm",))
    probabilities = [0.5 / 3.5, 1.0 / 3.0, 0.2, 0.8]
    assert [math.exp(value) for value in tree.log_probs] == pytest.approx(probabilities, rel=1e-6)


def test_whatever_chooses_among_nodes_loses_the_distributions() -> None:
    for chosen in (SAMPLED.prune(3), SAMPLED.select([0, 1]), SAMPLED.descend([7])):
        assert len(chosen) > 0
        assert chosen.distributions == ()
        with pytest.raises(InvalidTreeError, match="0 distributions"):
            SampledTree.of(chosen)
    assert SAMPLED.prune(4) is SAMPLED


def test_a_depth_limit_keeps_a_sampled_tree_one() -> None:
    cut = SampledTree.of(SAMPLED.up_to_depth(2))
    assert (cut.token_ids, cut.distributions) == ((7, 5, 8), (WIDE, NARROW, None, None))
    assert SampledTree.of(SAMPLED.up_to_depth(1)).distributions == (WIDE, None, None)
    assert SampledTree.of(SAMPLED.up_to_depth(0)).distributions == (None,)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"distribution_sizes": [3, 2, 0, 3, 0]}, "of 8 tokens, 7 ids and 7 weights"),
        ({"distribution_weights": [1.0] * 6}, "of 7 tokens, 7 ids and 6 weights"),
        ({"distribution_sizes": [3, 2, 0, 2]}, "4 distributions"),
        ({"distribution_sizes": [3, 0, 2, 2, 0]}, "node 0 has children but no distribution"),
        ({"distribution_token_ids": [5, 6, 4, 8, 9, 8, 9]}, "not in its distribution"),
        ({"distribution_token_ids": [5, 5, 7, 8, 9, 8, 9]}, "names a token twice"),
        ({"distribution_weights": [1, 1, 1, 1, 1, 0, 1]}, "not a finite number above 0"),
        ({"distribution_weights": [1, 1, 1, 1, 1, math.nan, 1]}, "not a finite number above 0"),
    ],
)
def test_distributions_that_a_tree_cannot_have_been_drawn_from_are_refused_at_the_door(
    change: dict[str, Any], complaint: str
) -> None:
    message = tree_to_proto(SAMPLED)
    for name, values in change.items():
        del getattr(message, name)[:]
        getattr(message, name).extend(values)
    with pytest.raises(InvalidTreeError, match=complaint):
        tree_from_proto(message)
