"""What a planner has learned, as plain data: another one may begin with it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from orchestrator.planner.regression import Evidence
from orchestrator.planner.value_model import TreeEvidence

MAX_SOURCES = 16
MAX_SOURCE_BYTES = 64
# Features of the regressions: of a pass, of the time between two, and of missed passes.
PASS_FEATURES, GAP_FEATURES, MISSED_FEATURES = 5, 4, 2


@dataclass(frozen=True)
class Knowledge:
    """Costs, missed passes, values and usual gains, fields as in the models that know them.

    All are means and weights of a machine, a target and its drafters, and say nothing of any prompt. `gains` are
    relative to a usual draft: of all requests, of greedy ones and of others; `context` is the usual committed length.

    Raises:
        ValueError: other features than the models have, too many sources, or a number that nothing could give.
    """

    costs: tuple[Evidence, Evidence]
    missed: tuple[Evidence, Evidence]
    trees: TreeEvidence
    gains: tuple[float, float, float]
    context: float

    def __post_init__(self) -> None:
        sizes = tuple(len(one.moments) for one in (*self.costs, *self.missed))
        if sizes != (PASS_FEATURES, GAP_FEATURES, MISSED_FEATURES, MISSED_FEATURES):
            raise ValueError(f"regressions of {sizes} features")
        if not all(0 <= number < math.inf for number in (*self.gains, self.context)):
            raise ValueError("a gain or context out of bounds")
        names = self.trees.sources
        if len(names) > MAX_SOURCES or not all(0 < len(name.encode()) <= MAX_SOURCE_BYTES for name in names):
            raise ValueError("too many sources, or too long names")
