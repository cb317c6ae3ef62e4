"""Formulas of the planner: the nodes that are worth their rows, and the longest wait that a draft is worth."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Budget:
    """The best selection: a node belongs to it if its path probability is at least `price`, in tokens per row.

    `rows` are those of the selected nodes, `gain` the tokens that they are expected to give.
    """

    price: float
    rate: float
    rows: float
    gain: float


def best_budget(
    nodes: Iterable[tuple[float, float]], tokens: float, time_s: float, row_s: float, max_rows: float = float("inf")
) -> Budget:
    """The selection of nodes that gives the most tokens per second.

    `nodes` are (path probability, how many) from the likeliest down, of all requests together; `tokens` and `time_s`
    are those of the pass without any node, and each row adds `row_s`.

    Why this is the optimum: a selection S yields (tokens + sum of its path probabilities) / (time_s + row_s |S|). For
    each size the likeliest nodes are best, and since a node is never likelier than its parent they always form trees.
    Adding a node that gives v in row_s raises the ratio exactly when v / row_s is above it. From the likeliest down,
    v falls and the ratio rises until they meet; from there on every node lowers it. The price is where they meet,
    rate x row_s: it is a fixed point, and a request that knows it can select its own nodes without the others'.
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
    """The longest wait that a draft of `gain` expected tokens makes good, at `rate` tokens per second of all requests.

    A round that stays out while others go on misses its share of the rate, rate / num_running; where all of them wait,
    all of the rate is lost, and all of their drafts gained. Both give the same limit. For one request alone it says:
    (1 + gain) / (wait + pass) >= 1 / pass.
    """
    return gain * num_running / rate
