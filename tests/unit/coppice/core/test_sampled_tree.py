"""Sampled trees: valid by construction; every child with the distribution that it was itself drawn from."""

from __future__ import annotations

from typing import Any

import pytest

from coppice.core.draft_distribution import DraftDistribution
from coppice.core.errors import InvalidTreeError
from coppice.core.sampled_tree import SampledTree
from coppice.core.tree import ROOT

ROOT_DRAFT = DraftDistribution((5, 6, 7), (1.0, 2.0, 5.0))
INNER_DRAFT = DraftDistribution((5, 8), (1.0, 3.0))
TREE: dict[str, Any] = {
    "token_ids": (7, 5, 8, 6),
    "parents": (ROOT, ROOT, 0, ROOT),
    "distributions": (ROOT_DRAFT, INNER_DRAFT, None, None, None),
}


def test_siblings_are_drawn_from_what_elder_ones_left() -> None:
    draws = list(SampledTree(**TREE).draws(ROOT))
    assert draws == [
        (0, ROOT_DRAFT),
        (1, DraftDistribution((5, 6), (1.0, 2.0))),
        (3, DraftDistribution((6,), (2.0,))),
    ]
    assert list(SampledTree(**TREE).draws(0)) == [(2, INNER_DRAFT)]
    assert list(SampledTree(**TREE).draws(3)) == []


def test_with_replacement_every_sibling_is_drawn_from_the_whole() -> None:
    tree = SampledTree(**{**TREE, "token_ids": (7, 7, 8, 6)}, with_replacement=True)
    assert list(tree.draws(ROOT)) == [(0, ROOT_DRAFT), (1, ROOT_DRAFT), (3, ROOT_DRAFT)]


def test_paths_and_children_follow_the_parents() -> None:
    tree = SampledTree(**TREE)
    assert len(tree) == 4
    assert tree.path(2) == (0, 2)
    assert tree.path(ROOT) == ()
    assert tree.children == ((0, 1, 3), (2,), (), (), ())


@pytest.mark.parametrize(
    ("arrays", "complaint"),
    [
        ({"parents": (ROOT, ROOT, 0)}, "4 token ids, 3 parents and 5 distributions"),
        ({"distributions": (ROOT_DRAFT, INNER_DRAFT, None, None)}, "4 distributions"),
        ({"parents": (ROOT, ROOT, 2, ROOT)}, "node 2 names parent 2"),
        ({"parents": (ROOT, -2, 0, ROOT)}, "node 1 names parent -2"),
        ({"distributions": (ROOT_DRAFT, None, None, None, None)}, "node 0 has children but no distribution"),
        ({"distributions": (None, INNER_DRAFT, None, None, None)}, "node -1 has children but no distribution"),
        ({"token_ids": (7, 5, 9, 6)}, "a child of node 0 is not in its distribution"),
        ({"token_ids": (7, 7, 8, 6)}, "node -1 repeats a child"),
    ],
)
def test_a_tree_that_cannot_have_been_drawn_cannot_be_built(arrays: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidTreeError, match=complaint):
        SampledTree(**{**TREE, **arrays})
