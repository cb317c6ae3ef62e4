"""Statistics of a request's rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from coppice.core.tree import ROOT, TokenTree
from coppice.v1 import tree_pb2
from orchestrator.request.ahead import AheadCounts
from orchestrator.request.rounds import Outcome

if TYPE_CHECKING:
    from orchestrator.request.latencies import Latencies


@dataclass(frozen=True)
class DraftGain:
    """Accepted tokens in `rounds` rounds that asked for drafts, in units of a usual draft's."""

    rounds: int = 0
    total: float = 0.0


@dataclass
class SourceTotals:
    """Verified and accepted nodes of one source."""

    proposed: int = 0
    accepted: int = 0


@dataclass
class OriginTotals:
    """Rounds by origin of their draft, with its nodes and the accepted ones."""

    rounds: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0


@dataclass
class PassCounts:
    """Forward passes of one size in rows."""

    count: int = 0
    total_us: int = 0


@dataclass
class Statistics:
    """Counts of one request; fields as in SpeculationStats and Timing of `inference.proto`."""

    rounds: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    redraft_tokens: int = 0
    stale_drafts: int = 0
    near_ties: int = 0
    sources: dict[str, SourceTotals] = field(default_factory=dict)
    origins: dict[tree_pb2.DraftOrigin, OriginTotals] = field(default_factory=dict)
    rounds_drafted_by_depth: list[int] = field(default_factory=list)
    rounds_accepted_by_depth: list[int] = field(default_factory=list)
    forward_us: int = 0
    linger_us: int = 0
    bubble_us: int = 0
    passes: dict[int, PassCounts] = field(default_factory=dict)
    ahead: AheadCounts = field(default_factory=AheadCounts)

    def record(self, outcome: Outcome, sent: Sequence[TokenTree]) -> None:
        """Count a round; `sent` are the trees sent for it, in order, of which the verifier took at most one."""
        self.rounds += bool(outcome.token_ids)
        self.draft_tokens += outcome.draft_nodes
        self.accepted_tokens += outcome.num_accepted
        self.redraft_tokens += outcome.redraft_nodes
        self.stale_drafts += outcome.stale_drafts
        self.near_ties += outcome.near_ties
        _count_depths(self.rounds_drafted_by_depth, outcome.draft_depth)
        _count_depths(self.rounds_accepted_by_depth, outcome.num_accepted)
        self.forward_us += outcome.pass_us
        self.linger_us += outcome.linger_us
        self.bubble_us += outcome.bubble_us
        if outcome.draft_nodes:
            self._count_origin(outcome)
        passes = self.passes.get(outcome.pass_rows)
        if passes is None:
            passes = self.passes[outcome.pass_rows] = PassCounts()
        passes.count += 1
        passes.total_us += outcome.pass_us
        if outcome.draft_nodes and sent:
            self._attribute(outcome, verified_tree(sent, outcome.draft_nodes))

    def add(self, other: Statistics) -> None:
        """Add the counts of another output, except those of passes, which outputs share."""
        self.rounds += other.rounds
        self.draft_tokens += other.draft_tokens
        self.accepted_tokens += other.accepted_tokens
        self.redraft_tokens += other.redraft_tokens
        self.stale_drafts += other.stale_drafts
        self.near_ties += other.near_ties
        self.linger_us += other.linger_us
        _add_depths(self.rounds_drafted_by_depth, other.rounds_drafted_by_depth)
        _add_depths(self.rounds_accepted_by_depth, other.rounds_accepted_by_depth)
        self.ahead.add(other.ahead)
        for name, counts in other.sources.items():
            own = self.sources.setdefault(name, SourceTotals())
            own.proposed += counts.proposed
            own.accepted += counts.accepted
        for made, others in other.origins.items():
            sums = self.origins.setdefault(made, OriginTotals())
            sums.rounds += others.rounds
            sums.draft_tokens += others.draft_tokens
            sums.accepted_tokens += others.accepted_tokens

    def _count_origin(self, outcome: Outcome) -> None:
        counts = self.origins.get(outcome.draft_origin)
        if counts is None:
            counts = self.origins[outcome.draft_origin] = OriginTotals()
        counts.rounds += 1
        counts.draft_tokens += outcome.draft_nodes
        counts.accepted_tokens += outcome.num_accepted

    def _attribute(self, outcome: Outcome, tree: TokenTree) -> None:
        for bit, name in enumerate(tree.source_names):
            if proposed := sum([mask >> bit & 1 for mask in tree.sources]) if tree.sources else len(tree):
                self._counts(name).proposed += proposed
        parent = ROOT
        for token in outcome.token_ids[: outcome.num_accepted]:
            child = tree.children.get((parent, token))
            if child is None:
                return
            for name in tree.sources_of(child):
                self._counts(name).accepted += 1
            parent = child

    def _counts(self, source: str) -> SourceTotals:
        counts = self.sources.get(source)
        if counts is None:
            counts = self.sources[source] = SourceTotals()
        return counts


class OutputClock:
    """Timestamps of an output in milliseconds since its request's arrival at `arrival_s` (monotonic seconds).

    `waited_s` are the seconds it waited for admission.
    """

    def __init__(
        self,
        arrival_s: float,
        waited_s: float = 0.0,
        latencies: Latencies | None = None,
        on_tokens: Callable[[], None] = lambda: None,
    ) -> None:
        """`latencies` observes times between rounds; `on_tokens` is called after each round with tokens."""
        self._on_tokens = on_tokens
        self._arrival_s = arrival_s
        self._latencies = latencies
        self._last_s = 0.0
        self.ttft_ms = 0.0
        self.queue_ms = self.door_ms = waited_s * 1000
        # Time of the first opening at a verifier, and duration of the pass with the first token.
        self.opened_ms = 0.0
        self.first_pass_ms = 0.0

    @property
    def first_token_s(self) -> float | None:
        """Monotonic time of the first token, in seconds."""
        return self._arrival_s + self.ttft_ms / 1000 if self.ttft_ms else None

    def elapsed_ms(self) -> float:
        """Milliseconds since the arrival."""
        return (time.monotonic() - self._arrival_s) * 1000

    @property
    def prompt_ms(self) -> float:
        """Milliseconds from the start of prefill to the first token; final once the verifier has sent its finish."""
        return max(self.ttft_ms - self.opened_ms - (self.queue_ms - self.door_ms), 0.0)

    def opened(self) -> None:
        """Note that a verifier was sent the sequence, for the first time or again."""
        if not self.ttft_ms:
            self.opened_ms = self.elapsed_ms()

    def tokens_came(self, pass_us: int = 0) -> None:
        """Note a round's tokens and the microseconds of its pass."""
        latencies = self._latencies
        if not self.ttft_ms:
            self.ttft_ms = self.elapsed_ms()
            self.first_pass_ms = pass_us / 1000
            if latencies is not None:
                latencies.to_first_token.observe(self.ttft_ms / 1000)
                self._last_s = time.monotonic()
        elif latencies is not None:
            now_s = time.monotonic()
            latencies.between_tokens.observe(now_s - self._last_s)
            self._last_s = now_s
        self._on_tokens()


def verified_tree(sent: Sequence[TokenTree], draft_nodes: int) -> TokenTree:
    """Tree that the verifier took: the latest with `draft_nodes` nodes, or else the latest larger one, pruned."""
    latest = tuple(reversed(sent))
    exact = next((tree for tree in latest if len(tree) == draft_nodes), None)
    return exact or next((tree for tree in latest if len(tree) > draft_nodes), sent[-1]).prune(draft_nodes)


def _count_depths(counts: list[int], depth: int) -> None:
    counts.extend([0] * (depth - len(counts)))
    for index in range(depth):
        counts[index] += 1


def _add_depths(counts: list[int], others: Sequence[int]) -> None:
    counts.extend([0] * (len(others) - len(counts)))
    for index, count in enumerate(others):
        counts[index] += count
