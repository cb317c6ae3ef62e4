"""Merging trees: exactly the union of their paths."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coppice.core.tree import EMPTY_TREE, TokenTree, chain
from orchestrator.request.merge import merge


@st.composite
def trees(draw: st.DrawFn, source: str) -> TokenTree:
    parents: list[int] = []
    tokens: list[int] = []
    for node in range(draw(st.integers(0, 8))):
        parent = draw(st.integers(-1, node - 1))
        taken = {token for token, other in zip(tokens, parents, strict=True) if other == parent}
        token = draw(st.integers(0, 12).filter(lambda value, taken=taken: value not in taken))
        parents.append(parent)
        tokens.append(token)
    values = [-draw(st.floats(0, 5)) for _ in tokens]
    return TokenTree(tuple(tokens), tuple(parents), tuple(values)).labelled(source)


@given(trees("a"), trees("b"), trees("c"))
def test_a_merged_tree_has_the_paths_of_all_and_the_names_of_who_proposed_them(
    a: TokenTree, b: TokenTree, c: TokenTree
) -> None:
    merged = merge([a, b, c])
    paths = list(merged.paths())
    proposed = {tree.source_names[0]: dict(zip(tree.paths(), tree.log_probs, strict=True)) for tree in (a, b, c)}
    assert len(paths) == len(set(paths))
    assert set(paths) == set().union(*proposed.values())
    for node, path in enumerate(paths):
        names = {name for name, known in proposed.items() if path in known}
        assert set(merged.sources_of(node)) == names
        assert merged.log_probs[node] == max(proposed[name][path] for name in names)


@given(trees("a"), trees("b"))
def test_the_first_trees_nodes_keep_their_indices(a: TokenTree, b: TokenTree) -> None:
    merged = merge([a, b])
    assert merged.token_ids[: len(a)] == a.token_ids
    assert merged.parents[: len(a)] == a.parents


def test_nothing_merges_to_nothing() -> None:
    assert merge([]) == merge([EMPTY_TREE, EMPTY_TREE]) == EMPTY_TREE


def test_a_drafter_cannot_name_its_nodes_after_another() -> None:
    claimed = TokenTree((1,), (-1,), (0.0,), source_names=("somebody",), sources=(1,))
    assert claimed.labelled("small-lm").sources_of(0) == ("small-lm",)
    assert merge([chain([1, 2]).labelled("a"), chain([1, 3]).labelled("b")]).sources_of(0) == ("a", "b")
