"""What all requests are told by the planner."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

# Nodes are cut only below this share of the price: both the price and their values are estimates.
CLEARLY = 0.8


@dataclass(frozen=True, slots=True)
class PlanSnapshot:
    """What the planner thinks of drafting now; until costs and values are known, that it is free and pays.

    `threshold` is the least gain, relative to that of a usual draft, with which a request's drafts pay. Of a usual
    draft, `gain` and `nodes` count what is worth at least `price` tokens per row. `rate` is in tokens per second.
    `pays_jointly` says whether it would pay if everybody drafted.
    """

    threshold: float = 0.0
    price: float = 0.0
    gain: float = 0.0
    nodes: float = 0.0
    rate: float = 0.0
    pays_jointly: bool = True
    # The logarithm of a path probability below which a node is clearly not worth its row.
    log_price: float = field(init=False)

    def __post_init__(self) -> None:
        log_price = math.log(CLEARLY * self.price) if self.price > 0 else -math.inf
        object.__setattr__(self, "log_price", log_price)

    @property
    def is_known(self) -> bool:
        """Whether there is anything to plan with."""
        return self.rate > 0
