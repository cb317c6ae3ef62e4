"""Whether costs that were learned elsewhere are costs of this place: the first passes tell."""

from __future__ import annotations

import statistics

from orchestrator.planner.cost_model import CostModel, PassSample

# So many passes are compared. If most of them took more than this many times what was expected, or less than that part
# of it, the costs are those of another machine. Prompts and what else begins with a process make single passes odd.
CHECKED_PASSES = 7
MOST_RATIO = 2.0


class BorrowedCosts:
    """Compares the first passes with what was expected of them."""

    def __init__(self, costs: CostModel) -> None:
        """`costs` are as they were learned elsewhere, and learn nothing more."""
        self._costs = costs
        self._ratios: list[float] = []

    @property
    def is_checked(self) -> bool:
        """Whether there is nothing more to find out."""
        return len(self._ratios) >= CHECKED_PASSES

    def are_refuted_by(self, record: PassSample) -> bool:
        """Take a pass in; whether it is the one that shows that the costs are wrong."""
        self._ratios.append(record.pass_s / self._costs.pass_s(record))
        return self.is_checked and not 1 / MOST_RATIO <= statistics.median(self._ratios) <= MOST_RATIO
