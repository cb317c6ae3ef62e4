"""Speculation policies: none, a fixed budget, or the planner's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.planner.adaptive import AdaptivePlanner
from orchestrator.planner.base import FixedPlanner, Planner

OFF, PLANNER, FIXED = "off", "planner", "fixed"
# As in `orchestrator/config.py`.
MAX_NODES, LINGER_US = 15, 40_000


@dataclass(frozen=True)
class Policy:
    """A policy by its name: off, planner, or fixed with the most draft nodes of a round.

    Raises ValueError if there is no such policy.
    """

    kind: str
    max_nodes: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in (OFF, PLANNER, FIXED) or (self.kind == FIXED) != (self.max_nodes is not None):
            raise ValueError("a policy is off, planner or fixed=N")
        if self.max_nodes is not None and self.max_nodes < 1:
            raise ValueError(f"fixed={self.max_nodes}: needs at least one node; off has none")

    @classmethod
    def parse(cls, text: str) -> Policy:
        """From off, planner or fixed=N. Raises ValueError if it is none of these."""
        kind, has_nodes, nodes = text.partition("=")
        if not has_nodes:
            return cls(kind)
        try:
            return cls(kind, int(nodes))
        except ValueError as error:
            raise ValueError(f"a policy is off, planner or fixed=N, got {text!r}") from error

    def __str__(self) -> str:
        return self.kind if self.max_nodes is None else f"{self.kind}={self.max_nodes}"

    @property
    def speculates(self) -> bool:
        """Whether drafts are ever asked for."""
        return self.kind != OFF

    @property
    def forced(self) -> bool:
        """Whether drafts are asked for whatever the load."""
        return self.kind == FIXED

    def planner(
        self, max_nodes: int = MAX_NODES, linger_us: int = LINGER_US
    ) -> Callable[[Callable[[], float]], Planner]:
        """The orchestrator's own planner, made for a clock."""
        if self.kind == PLANNER:
            return lambda clock: AdaptivePlanner(max_nodes, linger_us, clock=clock)
        # A server's limit holds for every request, but here the question is what a budget would give.
        return lambda clock: FixedPlanner(max(max_nodes, self.max_nodes or 0), linger_us)
