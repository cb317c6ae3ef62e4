"""Adaptive planners of all verifiers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from orchestrator.planner.adaptive import AdaptivePlanner, AdaptiveRequest
from orchestrator.planner.base import FixedPlanner, Planner
from orchestrator.planner.node_values import NodeValues


class FleetPlanner:
    """One adaptive planner per verifier, since passes, costs and prices differ by verifier.

    Values of drafts depend on drafters and texts and are learned together. A request belongs to the planner of its
    verifier, and moves when it is opened on another.
    """

    def __init__(
        self,
        verifiers: Sequence[str],
        max_nodes: int,
        linger_us: int,
        clock: Callable[[], float] = time.monotonic,
        is_usable: Callable[[str], bool] = lambda address: True,
    ) -> None:
        """`verifiers` are distinct addresses; `is_usable` says whether requests can go to one now."""
        self._is_usable = is_usable
        self.fixed = FixedPlanner(max_nodes, linger_us)
        values = NodeValues()
        self.planners = {verifier: AdaptivePlanner(max_nodes, linger_us, clock, values) for verifier in verifiers}

    def follow(self, is_greedy: bool, priority: int = 0) -> AdaptiveRequest:
        """Plans of a new request; until it is opened on a verifier, those of the least busy one."""
        usable = [planner for address, planner in self.planners.items() if self._is_usable(address)]
        least_busy = min(usable or self.planners.values(), key=lambda planner: planner.num_begun)
        return AdaptiveRequest(least_busy, is_greedy, priority, self.planners)


def adaptive_planners(planner: Planner) -> Mapping[str, AdaptivePlanner]:
    """Adaptive planners by address of their verifier; empty for a fixed planner."""
    return planner.planners if isinstance(planner, FleetPlanner) else {}
