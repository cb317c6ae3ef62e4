"""Small trees of what followed: counted exactly while they fit, bounded and still trees when they do not."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from coppice.core.tree import ROOT
from orchestrator.prefix_cache.values import MAX_COUNT, MAX_DEPTH, MAX_NODES, Continuations, InvalidValueError


def counted(tree: Continuations) -> dict[tuple[int, ...], int]:
    """How often each prefix was seen, by the tree."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.token_ids, tree.parents, strict=True):
        paths.append(((*paths[parent], token)) if parent != ROOT else (token,))
    return dict(zip(paths, tree.counts, strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_what_fits_is_counted_exactly(seed: int) -> None:
    rng = random.Random(seed)
    expected: Counter[tuple[int, ...]] = Counter()
    tree = Continuations()
    while len(expected) < MAX_NODES - 6:
        path = tuple(rng.randrange(4) for _ in range(rng.randrange(6)))
        tree = tree.with_path(path)
        expected.update(path[: end + 1] for end in range(len(path)))
        assert counted(tree) == expected


@pytest.mark.parametrize("seed", range(5))
def test_what_does_not_fit_makes_room_for_what_is_new_and_what_is_frequent(seed: int) -> None:
    rng = random.Random(seed)
    frequent = tuple(range(1000, 1010))
    tree = Continuations()
    for _ in range(64):
        tree = tree.with_path(frequent)
    for _ in range(200):
        path = tuple(rng.randrange(900) for _ in range(rng.randrange(1, MAX_DEPTH)))
        tree = tree.with_path(path).with_path(frequent)
        assert len(tree.token_ids) <= MAX_NODES
        seen = counted(tree)
        assert path in seen
        assert frequent in seen


def test_a_path_is_cut_at_the_greatest_depth() -> None:
    tree = Continuations().with_path(range(MAX_DEPTH + 5))
    assert list(tree.paths()) == [tuple(range(MAX_DEPTH))]


def test_counts_are_bounded() -> None:
    tree = Continuations((1,), (ROOT,), (MAX_COUNT,)).with_path([1])
    assert tree.counts == (MAX_COUNT // 2,)


def test_paths_come_rarest_first() -> None:
    tree = Continuations().with_path([1, 2]).with_path([3]).with_path([3]).with_path([1, 4]).with_path([1, 4])
    assert next(tree.paths()) == (1, 2)
    assert {*tree.paths()} == {(1, 2), (1, 4), (3,)}


@pytest.mark.parametrize(
    ("token_ids", "parents", "counts"),
    [
        ((1,), (0,), (1,)),
        ((1,), (-2,), (1,)),
        ((1, 1), (ROOT, ROOT), (1, 1)),
        ((1,), (ROOT,), (0,)),
        ((1, 2), (ROOT, 0), (1, 2)),
        ((1,), (ROOT,), (MAX_COUNT + 1,)),
        ((1,), (ROOT, 0), (1,)),
        (tuple(range(MAX_NODES + 1)), (ROOT,) * (MAX_NODES + 1), (1,) * (MAX_NODES + 1)),
        (tuple(range(MAX_DEPTH + 1)), tuple(range(-1, MAX_DEPTH)), (1,) * (MAX_DEPTH + 1)),
    ],
)
def test_what_is_no_tree_with_counts_is_refused(
    token_ids: tuple[int, ...], parents: tuple[int, ...], counts: tuple[int, ...]
) -> None:
    with pytest.raises(InvalidValueError):
        Continuations(token_ids, parents, counts)
