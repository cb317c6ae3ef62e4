"""Formulas of the planner: nodes worth their rows, and the longest worthwhile wait for a draft."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Budget:
    """Optimal selection: all nodes with path probability of at least `price`, in tokens per row.

    `rows` is the number of selected nodes, `gain` their expected accepted tokens.
    """

    price: float
    rate: float
    rows: float
    gain: float


def best_budget(
    nodes: Iterable[tuple[float, float]], tokens: float, time_s: float, row_s: float, max_rows: float = float("inf")
) -> Budget:
    """Selection of nodes that maximises tokens per second.

    `nodes` are (path probability, count) in descending order over all requests; `tokens` and `time_s` are those of the
    pass without nodes, and each row adds `row_s`.

    Proof: a selection S yields (tokens + sum of its path probabilities) / (time_s + row_s |S|). For each size the
    likeliest nodes are best, and since a node is never likelier than its parent they form trees. A node of value v
    raises the ratio if and only if v / row_s is above it. In descending order, v falls and the ratio rises until they
    meet; every further node lowers it. The price is v at that point, rate x row_s: a fixed point, by which each request
    can select its own nodes without knowing the others'.
    """
    rows = gain = 0.0
    rate = tokens / time_s
    for value, count in nodes:
        if value <= rate * row_s or rows >= max_rows:
            break
        taken = min(count, max_rows - rows)
        rows += taken
        gain += value * taken
        rate = (tokens + gain) / (time_s + row_s * rows)
    return Budget(rate * row_s, rate, rows, gain)


def worthwhile_linger_s(gain: float, rate: float, num_running: int) -> float:
    """Longest wait that a draft of `gain` expected tokens is worth, at `rate` tokens per second of all requests.

    A round left out while others continue loses its share of the rate, rate / num_running; if all wait, the whole rate
    is lost and all drafts are gained. Both give the same bound. For a single request: (1 + gain) / (wait + pass) >= 1 /
    pass.
    """
    return gain * num_running / rate
