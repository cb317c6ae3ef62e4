"""The planned shape is the best of all, by trying all of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from drafter_svc.drafters.small_lm.tree_shape import MAX_LEVELS, MAX_NODES, MAX_WIDTH, tree_widths

RATES = {"measured": (0.745, 0.133, 0.046, 0.024), "flat": (0.3, 0.3, 0.2, 0.1), "one": (0.9,)}


def value(widths: Sequence[int], rates: Sequence[float], cost: float) -> float:
    total, nodes, reach = 0.0, 1, 1.0
    for width in widths:
        nodes, reach = nodes * width, reach * sum(rates[:width])
        total += reach - cost * nodes
    return total


def is_within(widths: Sequence[int], rates: Sequence[float], max_nodes: int, min_gain: float) -> bool:
    sizes = list(itertools.accumulate(widths, lambda nodes, width: nodes * width))
    reached = list(itertools.accumulate([sum(rates[:width]) for width in widths], lambda one, other: one * other))
    return sum(sizes) <= max_nodes and all(reach >= min_gain for reach in reached[:-1])


@pytest.mark.parametrize("rates", RATES.values(), ids=RATES)
@pytest.mark.parametrize("cost", [0.0, 0.02, 0.1])
@pytest.mark.parametrize(("max_nodes", "min_gain"), [(4, 0.0), (9, 0.3), (15, 0.1)])
def test_no_other_shape_promises_more(rates: tuple[float, ...], cost: float, max_nodes: int, min_gain: float) -> None:
    found = tree_widths(max_nodes, 4, rates, cost, min_gain)
    assert is_within(found, rates, max_nodes, min_gain)
    widths = range(1, len(rates) + 1)
    others = [shape for levels in range(5) for shape in itertools.product(widths, repeat=levels)]
    possible = [shape for shape in others if is_within(shape, rates, max_nodes, min_gain)]
    assert value(found, rates, cost) == pytest.approx(max(value(shape, rates, cost) for shape in possible))


def test_a_node_that_costs_more_than_it_brings_is_left_out() -> None:
    assert tree_widths(15, 8, (0.745, 0.133), 0.8, 0.0) == ()
    assert tree_widths(0, 8, (0.745, 0.133), 0.0, 0.0) == ()


def test_shapes_are_bounded_whatever_is_asked_for() -> None:
    widths = tree_widths(4096, 10**6, (0.4, 0.3, 0.2, 0.05, 0.04), 0.0, 0.0)
    assert len(widths) <= MAX_LEVELS
    assert max(widths) <= MAX_WIDTH
    assert sum(itertools.accumulate(widths, lambda nodes, width: nodes * width)) <= MAX_NODES
