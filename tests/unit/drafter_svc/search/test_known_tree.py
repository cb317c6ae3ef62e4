"""The best tree of what was read: that of the search in steps, and that of going through everything."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest

from coppice.core.tree import ROOT, TokenTree
from coppice.search.tree_builder import Frontier, build_tree
from coppice.search.tree_limits import Children, TreeLimits
from drafter_svc.search.known_tree import known_tree

NO_CHILDREN = Children((), ())


class Read:
    """Rows read at random behind a root, each with a few children."""

    def __init__(self, seed: int, num_rows: int) -> None:
        rng = random.Random(seed)
        self.rows: dict[tuple[int, int], int] = {}
        self._children = {ROOT: self._drawn(rng)}
        while len(self.rows) < num_rows:
            parent = rng.choice(list(self._children))
            behind = self._children[parent].token_ids
            if not behind:
                continue
            token = rng.choice(behind)
            if (parent, token) not in self.rows:
                row = self.rows[parent, token] = len(self.rows)
                self._children[row] = self._drawn(rng)

    @staticmethod
    def _drawn(rng: random.Random) -> Children:
        weights = sorted((rng.expovariate(1) ** 2 for _ in range(5)), reverse=True)[: rng.randrange(5) + 1]
        tokens = rng.sample(range(10), len(weights))
        return Children(tokens, [math.log(weight / (sum(weights) + 0.1)) for weight in weights])

    def find(self, parent_row: int, token_id: int) -> int | None:
        return self.rows.get((parent_row, token_id))

    def children(self, row: int) -> Children:
        return self._children[row]


def in_steps(read: Read, top: int, limits: TreeLimits) -> TokenTree:
    """By the search of drafts, which may take any number of steps and finds nothing behind what was not read."""
    rows: list[int | None] = []

    def expand(frontier: Frontier) -> Sequence[Children]:
        parents = [top if parent == ROOT else rows[parent] for parent in frontier.parent_rows]
        found = [
            None if parent is None else read.find(parent, token)
            for parent, token in zip(parents, frontier.token_ids, strict=True)
        ]
        rows.extend(found)
        return [NO_CHILDREN if row is None else read.children(row) for row in found]

    return build_tree(read.children(top), expand, limits, "test")


def everything(read: Read, top: int, limits: TreeLimits) -> list[tuple[float, tuple[int, ...]]]:
    """All paths behind a row within its limits but for the number of nodes, likeliest first."""
    found = []

    def visit(row: int, path: tuple[int, ...], above: float) -> None:
        for token, log_prob in zip(*read.children(row), strict=True):
            value, below = above + log_prob, read.find(row, token)
            if value >= limits.min_path_log_prob and len(path) < limits.max_depth:
                found.append((value, (*path, token)))
                if below is not None:
                    visit(below, (*path, token), value)

    visit(top, (), 0.0)
    return sorted(found, reverse=True)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize(
    "limits",
    [
        TreeLimits(max_nodes=8),
        TreeLimits(max_nodes=1),
        TreeLimits(max_nodes=99, min_path_log_prob=math.log(0.02)),
        TreeLimits(max_nodes=30, max_depth=2),
        TreeLimits(max_nodes=5, max_depth=0),
    ],
    ids=["few nodes", "one node", "likely ones", "shallow", "no depth"],
)
def test_it_is_the_best_tree_of_what_was_read(seed: int, limits: TreeLimits) -> None:
    read = Read(seed, num_rows=12)
    for top in (ROOT, 0, 5):
        tree = known_tree(read, top, limits, "test")
        best = everything(read, top, limits)[: limits.max_nodes]
        assert list(tree.paths()) == [path for _, path in best]
        assert tree.path_log_probs == pytest.approx([value for value, _ in best])
        if limits.max_depth:
            assert set(tree.paths()) == set(in_steps(read, top, limits).paths())
        assert tree.source_names == ("test",)


def test_behind_a_row_without_children_there_is_nothing() -> None:
    class Barren:
        def find(self, parent_row: int, token_id: int) -> int | None:
            raise AssertionError("there is nothing to find")

        def children(self, row: int) -> Children:
            return NO_CHILDREN

    assert len(known_tree(Barren(), 3, TreeLimits(max_nodes=8), "test")) == 0
