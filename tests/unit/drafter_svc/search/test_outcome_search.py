"""Which rows are read ahead, step by step, on a drafter whose every answer is written down."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from coppice.core.tree import EMPTY_TREE, ROOT, TokenTree, chain
from coppice.search.tree_limits import Children, TreeLimits
from drafter_svc.search.ahead_pace import AheadPace
from drafter_svc.search.outcome_search import DraftAhead, OutcomeSearch, Row

LIMITS = TreeLimits(max_nodes=8, max_steps=99)


class WrittenReader:
    """After every token, tokens 0, 1, 2 … with the given probabilities; what was read, step by step."""

    def __init__(self, probabilities: Sequence[float]) -> None:
        self._children = Children(list(range(len(probabilities))), [math.log(p) for p in probabilities])
        # Of each row, its parent, its token and the log-probability of all that leads there.
        self.rows: list[tuple[int, int, float]] = []
        self.steps: list[list[float]] = []

    def find(self, parent_row: int, token_id: int) -> int | None:
        places = {(parent, token): row for row, (parent, token, _) in enumerate(self.rows)}
        return places.get((parent_row, token_id))

    def children(self, row: int) -> Children:
        return self._children

    def read_rows(self, rows: Sequence[Row]) -> None:
        step = []
        for parent, token, _ in rows:
            above = 0.0 if parent == ROOT else self.rows[parent][2]
            step.append(above + self._children.log_probs[token])
        self.rows += [(row.parent_row, row.token_id, value) for row, value in zip(rows, step, strict=True)]
        self.steps.append(step)

    def tree(self, row: int, depth: int, limits: TreeLimits) -> TokenTree:
        return chain([0]) if depth < limits.max_depth else EMPTY_TREE


def search(probabilities: Sequence[float], expected: TokenTree, steps: int = 12) -> WrittenReader:
    reader = WrittenReader(probabilities)
    one = OutcomeSearch(expected, reader, LIMITS, DraftAhead(max_steps=steps), AheadPace(lambda: 0.0))
    while one.step():
        pass
    assert len(reader.steps) <= steps
    return reader


@pytest.mark.parametrize("probabilities", [(0.9, 0.08, 0.02), (0.97, 0.02, 0.01), (0.4, 0.3, 0.2, 0.1)])
def test_rows_of_a_step_are_about_as_likely_as_its_first(probabilities: Sequence[float]) -> None:
    reader = search(probabilities, chain([0, 0, 1]))
    for step in reader.steps:
        assert min(step) >= max(step) + math.log(0.1) - 1e-9
        assert len(step) <= DraftAhead().width


def test_a_sure_thing_is_followed_row_by_row_and_even_odds_many_rows_at_a_time() -> None:
    sure, even = search((0.97, 0.02, 0.01), chain([0, 0])), search((0.26, 0.25, 0.25, 0.24), chain([0, 0]))
    assert max(map(len, sure.steps[:4])) == 1
    assert max(map(len, even.steps)) == DraftAhead().width


def test_a_large_tree_leaves_a_node_to_each_further_outcome() -> None:
    class Generous(WrittenReader):
        def tree(self, row: int, depth: int, limits: TreeLimits) -> TokenTree:
            return chain([0] * 30)

    reader = Generous((0.26, 0.25, 0.25, 0.24))
    ahead = DraftAhead(max_steps=12, max_nodes=30)
    one = OutcomeSearch(chain([0, 0]), reader, LIMITS, ahead, AheadPace(lambda: 0.0))
    while one.step():
        pass
    sizes = [len(draft.tree) for draft in one.take()]
    assert len(sizes) > 5
    assert sizes[0] > 1
    assert min(sizes) == 1
    assert sum(sizes) <= ahead.max_nodes
