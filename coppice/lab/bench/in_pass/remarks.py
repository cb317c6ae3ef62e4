"""What has to be said beside the figures of early pruning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from coppice.lab.bench.in_pass.variants import SWITCHES

# Passes whose rows differ by more are not the same trees.
MOST_DIFFERENCE = 0.05


def uneven_trees(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Where passes with pruning began with other rows than those without.

    With many requests at once the verifier cuts their trees to the rows that its passes make cheap, and it learns these
    from its own passes.
    """
    found = {(row["group"], row["temperature"], row["contender"]): row for row in rows}
    without, *switches = SWITCHES
    for row in rows:
        name: str = row["contender"]
        if row["max_nodes"] is None or not name.endswith(without):
            continue
        for switch in switches:
            other = found[row["group"], row["temperature"], name.removesuffix(without) + switch]
            pair = row["rows_per_pass"], other["rows_per_pass"]
            if all(pair) and abs(pair[1] / pair[0] - 1) > MOST_DIFFERENCE:
                yield (
                    f"{other['name']}: passes begin with {pair[1]:.1f} rows, those without pruning with {pair[0]:.1f}: "
                    "their times compare other trees, too."
                )
