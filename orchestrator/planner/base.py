"""The plan of a round: its draft nodes at most, and the verifier's wait for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol

from coppice.core.tree import TokenTree
from orchestrator.request.rounds import Outcome


@dataclass(frozen=True)
class VerifierLoad:
    """How busy the verifier was when it last said so."""

    batch_size: int = 0
    rows: int = 0
    pass_us: int = 0
    queued_sequences: int = 0
    free_kv_blocks: int = 0


class RoundContext(NamedTuple):
    """What is known about a request, load aside, when a round of it is planned: few rounds have another one."""

    # Whether a drafter is connected that works for this request.
    has_drafter: bool
    # The request's own limit of nodes, where it has one.
    requested_nodes: int | None = None
    # Speculate whatever the load.
    forced: bool = False
    # A pass computes its rows in multiples of this.
    row_multiple: int = 1
    # Kinds of the drafters that are there, where there are several of which some may be left out.
    sources: tuple[str, ...] = ()


# The load of a verifier that has not told it yet.
UNKNOWN_LOAD = VerifierLoad()


@dataclass(frozen=True)
class RoundPlan:
    """Limits of a round, and in which multiples its rows, one for the root and one per node, are computed.

    With `max_nodes` 0 drafters are not asked for anything, and else those of the kinds in `left_out` are not.
    `row_price` is what a node has to be worth, in tokens; 0 while that is not known.
    """

    max_nodes: int
    linger_us: int
    row_multiple: int = 1
    left_out: frozenset[str] = frozenset()
    row_price: float = 0.0


# Plans are immutable, and few differ: most rounds get one that is there already.
round_plan = lru_cache(maxsize=256)(RoundPlan)


@dataclass(frozen=True)
class DraftGain:
    """Accepted tokens of so many rounds that had asked for drafts, in all, those of a usual draft being 1."""

    rounds: int = 0
    total: float = 0.0


class RequestPlanner(Protocol):
    """Plans one request's rounds; called several times per round, so it has to be quick."""

    def runs_on(self, verifier: str) -> None:
        """The request was opened on the verifier at this address, for the first time or anew."""

    def plan(self, round_context: RoundContext, load: VerifierLoad = UNKNOWN_LOAD) -> RoundPlan:
        """The next round's limits; `load` is the verifier's."""

    def tree_arrived(self, took_s: float | None = None) -> None:
        """A draft has come, in time or late, so long after its drafter was told of the outcome that it follows."""

    def select(self, tree: TokenTree) -> TokenTree:
        """The nodes of a draft that are worth their rows. Not for sampled trees, which travel whole."""

    def round_over(self, outcome: Outcome, sent: Sequence[TokenTree], asked: bool) -> None:
        """Learn from a round: the trees sent for it, and whether drafters had been asked for one."""

    def know(self, known: DraftGain) -> None:
        """Take what drafts of requests with the same beginning have gained; it may come at any time."""

    @property
    def gain(self) -> DraftGain:
        """What drafts of this request have gained."""

    def close(self) -> None:
        """The request has ended."""


class Planner(Protocol):
    """Plans every request."""

    def follow(self, is_greedy: bool, priority: int = 0) -> RequestPlanner:
        """The plans of a request that begins now."""

    def follow_apart(self) -> RequestPlanner:
        """The plans of one that forces speculation with sources of its own choice: no measure of what others gain."""


class FixedPlanner:
    """The same budget and linger for every round, as long as there is a drafter to wait for.

    A drafter whose trees do not come in time is the verifier's to notice: it stops waiting by itself.
    """

    def __init__(self, max_nodes: int, linger_us: int) -> None:
        self.max_nodes = max_nodes
        self.linger_us = linger_us

    def follow(self, is_greedy: bool, priority: int = 0) -> FixedPlanner:
        """Every request is planned alike."""
        return self

    def follow_apart(self) -> FixedPlanner:
        """Every request is planned alike."""
        return self

    def runs_on(self, verifier: str) -> None:
        """Every verifier is planned alike."""

    def plan(self, round_context: RoundContext, load: VerifierLoad = UNKNOWN_LOAD) -> RoundPlan:
        """The fixed plan; no linger where no draft can come."""
        nodes, multiple = self.limits(round_context, load)
        waits = round_context.has_drafter and nodes > 0
        return round_plan(nodes, self.linger_us if waits else 0, multiple)

    def limits(self, round_context: RoundContext, load: VerifierLoad) -> tuple[int, int]:
        """The most nodes of a round, and the multiple in which its rows are computed."""
        requested = round_context.requested_nodes
        nodes = self.max_nodes if requested is None else min(requested, self.max_nodes)
        # In company a sequence shares its multiple with others, and what fills it is not free.
        return nodes, round_context.row_multiple if load.batch_size <= 1 else 1

    def tree_arrived(self, took_s: float | None = None) -> None:
        """Nothing is learned."""

    def select(self, tree: TokenTree) -> TokenTree:
        """All of it."""
        return tree

    def round_over(self, outcome: Outcome, sent: Sequence[TokenTree], asked: bool) -> None:
        """Nothing is learned."""

    def know(self, known: DraftGain) -> None:
        """Nothing depends on it."""

    @property
    def gain(self) -> DraftGain:
        """Nothing is measured."""
        return DraftGain()

    def close(self) -> None:
        """Nothing is held."""
