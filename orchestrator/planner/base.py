"""Interface of planners: upper bounds of a round's draft nodes and linger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol

from coppice.core.tree import TokenTree
from orchestrator.request.rounds import UNKNOWN_LOAD, Outcome, VerifierLoad
from orchestrator.request.statistics import DraftGain


class RoundContext(NamedTuple):
    """Properties of a request besides load that plans depend on; equal for most rounds."""

    # Whether a drafter is connected for this request.
    has_drafter: bool
    # The request's own bound of nodes.
    requested_nodes: int | None = None
    # Speculate regardless of load.
    forced: bool = False
    # A pass computes its rows in multiples of this.
    row_multiple: int = 1
    # Kinds of the connected drafters, if several and some may be left out.
    sources: tuple[str, ...] = ()


@dataclass(frozen=True)
class RoundPlan:
    """Limits of a round, and the multiple in which its rows (root and nodes) are computed.

    With `max_nodes` 0 no drafter is asked, otherwise all but the kinds in `left_out`. `row_price` is the least value of
    a node in tokens; 0 if unknown.
    """

    max_nodes: int
    linger_us: int
    row_multiple: int = 1
    left_out: frozenset[str] = frozenset()
    row_price: float = 0.0


# Plans are immutable and few differ, so they are cached.
round_plan = lru_cache(maxsize=256)(RoundPlan)


class RequestPlanner:
    """Plans one request's rounds; as it is, without drafts, and learning nothing.

    Called several times per round, so it must be fast.
    """

    def runs_on(self, verifier: str) -> None:
        """The request was opened on the verifier at this address, for the first time or again."""

    def plan(self, round_context: RoundContext, load: VerifierLoad = UNKNOWN_LOAD) -> RoundPlan:
        """Limits of the next round under the verifier's `load`."""
        return round_plan(0, 0)

    def tree_arrived(self) -> None:
        """A draft arrived, in time or late."""

    def select(self, tree: TokenTree) -> TokenTree:
        """Nodes of a draft worth their rows; all of them unless overridden. Not for sampled trees, sent whole."""
        return tree

    def round_over(self, outcome: Outcome, sent: Sequence[TokenTree], asked: bool) -> None:
        """Learn from a round: the trees sent for it, and whether drafters were asked."""

    def know(self, known: DraftGain) -> None:
        """Add records of requests with the same beginning; may be called at any time."""

    @property
    def gain(self) -> DraftGain:
        """Record of this request's drafts."""
        return DraftGain()

    def close(self) -> None:
        """End the request."""


class Planner(Protocol):
    """Plans all requests."""

    def follow(self, is_greedy: bool, priority: int = 0) -> RequestPlanner:
        """Plans of a new request."""

    @property
    def fixed(self) -> FixedPlanner:
        """Plans of a request that forces speculation with its own choice of sources, and is not learned from."""


class FixedPlanner(RequestPlanner):
    """Same budget and linger for every round with a drafter, of all requests.

    The verifier itself stops waiting for drafters whose trees do not come in time.
    """

    def __init__(self, max_nodes: int, linger_us: int) -> None:
        self.max_nodes = max_nodes
        self.linger_us = linger_us

    def follow(self, is_greedy: bool, priority: int = 0) -> FixedPlanner:
        """The same plan for all requests."""
        return self

    @property
    def fixed(self) -> FixedPlanner:
        """The same plan for all requests."""
        return self

    def plan(self, round_context: RoundContext, load: VerifierLoad = UNKNOWN_LOAD) -> RoundPlan:
        """The fixed plan; no linger without a drafter."""
        nodes, multiple = self.limits(round_context, load)
        waits = round_context.has_drafter and nodes > 0
        return round_plan(nodes, self.linger_us if waits else 0, multiple)

    def limits(self, round_context: RoundContext, load: VerifierLoad) -> tuple[int, int]:
        """Upper bound of a round's nodes, and the multiple in which its rows are computed."""
        requested = round_context.requested_nodes
        nodes = self.max_nodes if requested is None else min(requested, self.max_nodes)
        # In a batch the multiple is shared with other sequences, and filling it is not free.
        return nodes, round_context.row_multiple if load.batch_size <= 1 else 1
