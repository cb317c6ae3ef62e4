"""Drafting ahead: what may follow the likely outcomes of the tree that is being verified, one short step at a time."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from coppice.core.tree import ROOT, TokenTree
from coppice.search.tree_limits import Children, TreeLimits
from drafter_svc.drafters.base import AheadDraft
from drafter_svc.search.ahead_pace import AheadPace
from drafter_svc.search.known_tree import KnownRows
from drafter_svc.search.likely_outcomes import FanOut, LikelyOutcome, likely_outcomes, own_path_log_probs

# Nodes of the expected tree that are accepted less often than this are not read: nothing behind them is likely.
_LEAST_REACH = math.log(0.01)
USUAL_FAN_OUT = FanOut()
# Least likelihood of a row, compared with the likeliest of its step: eight rows take four times as long as one.
_LEAST_SHARE = math.log(0.1)
# Trees that are put together per step.
_TREES_PER_STEP = 4
# Most outcomes that are drafted for.
MOST_OUTCOMES = 24


class Row(NamedTuple):
    """A node to read: the row of its parent (-1: the end of the committed tokens), its token, and its depth from 1."""

    parent_row: int
    token_id: int
    depth: int


class Reader(KnownRows, Protocol):
    """What has been read behind the committed tokens, and how more is."""

    def read_rows(self, rows: Sequence[Row]) -> None:
        """Read nodes whose parents were read, in one forward pass."""
        ...

    def tree(self, row: int, depth: int, limits: TreeLimits) -> TokenTree:
        """The best tree behind a row at this depth, of what has been read."""
        ...


@dataclass(frozen=True, slots=True)
class DraftAhead:
    """How far is drafted while the verifier is busy.

    At most `max_steps` forward passes per round of at most `width` rows, each of which promises at least
    `min_step_gain` accepted tokens; `max_nodes` in all trees together, which bounds the message. Time is what `clock`
    says, in seconds.
    """

    max_steps: int = 0
    width: int = 8
    min_step_gain: float = 0.02
    max_nodes: int = 96
    fan_out: FanOut = USUAL_FAN_OUT
    clock: Callable[[], float] = time.monotonic


class OutcomeSearch:
    """First the expected tree's nodes are read, then its outcomes and what may follow them, the likeliest first."""

    def __init__(
        self, expected: TokenTree, reader: Reader, limits: TreeLimits, ahead: DraftAhead, pace: AheadPace
    ) -> None:
        """`limits` are those of a draft behind an outcome; `max_depth` counts from the committed tokens."""
        self._expected = expected
        self._reader = reader
        self._limits = limits
        self._ahead = ahead
        self._pace = pace
        self._steps_left = ahead.max_steps
        # Of each node of the expected tree, and of the root, its row once that is known.
        self._rows: dict[int, int] = {ROOT: ROOT}
        self._outcomes: Sequence[LikelyOutcome] | None = None
        # What may be read next, likeliest first: minus the log-probabilities of all of it and of it behind the outcome.
        self._open: list[tuple[float, float, Row]] = []
        self._left: list[LikelyOutcome] = []
        self._drafts: list[AheadDraft] = []
        self._num_nodes = 0
        self._is_taken = False
        self.is_over = False

    def step(self) -> bool:
        """One forward pass, or a few trees of what was read; whether there is more to do."""
        if self._outcomes is None and not self._read_expected():
            self._choose_outcomes()
        elif self._outcomes is not None and not (self._may_read and self._read_behind()):
            self._steps_left = 0
            self._put_together()
        return not self.is_over

    def take(self) -> tuple[AheadDraft, ...]:
        """The trees, the likeliest outcome first: once, when it is over."""
        if not self.is_over or self._is_taken:
            return ()
        self._is_taken = True
        return tuple(self._drafts)

    @property
    def _may_read(self) -> bool:
        return self._steps_left > 0 and self._pace.may_read

    def _children(self) -> dict[int, Children]:
        return {node: self._reader.children(row) for node, row in self._rows.items()}

    def _read_expected(self) -> bool:
        """Read nodes of the expected tree; False when none is left that matters."""
        tree, reader = self._expected, self._reader
        for node, (token, parent) in enumerate(zip(tree.token_ids, tree.parents, strict=True)):
            if node not in self._rows and parent in self._rows:
                row = reader.find(self._rows[parent], token)
                if row is not None:
                    self._rows[node] = row
        paths = own_path_log_probs(tree, self._children())
        wanted = [
            node
            for node, parent in enumerate(tree.parents)
            if node not in self._rows
            and parent in self._rows
            and paths[node] >= _LEAST_REACH
            and tree.depths[node] < self._limits.max_depth
        ]
        if not wanted or not self._may_read:
            return False
        self._steps_left -= 1
        least = max(paths[node] for node in wanted) + _LEAST_SHARE
        likely = [node for node in wanted if paths[node] >= least]
        chosen = sorted(likely, key=lambda node: (-paths[node], node))[: self._ahead.width]
        parent_rows = [self._rows[tree.parents[node]] for node in chosen]
        tokens, depths = [tree.token_ids[node] for node in chosen], [tree.depths[node] for node in chosen]
        self._reader.read_rows([Row(*row) for row in zip(parent_rows, tokens, depths, strict=True)])
        return True

    def _choose_outcomes(self) -> None:
        tree = self._expected
        self._outcomes = likely_outcomes(tree, self._children(), self._ahead.fan_out, MOST_OUTCOMES)
        for one in self._outcomes:
            self._offer(self._row(one), one.log_prob, 0.0)
        self._left = list(reversed(self._outcomes))

    def _row(self, outcome: LikelyOutcome) -> Row:
        depth = 1 if outcome.end == ROOT else self._expected.depths[outcome.end] + 1
        return Row(self._rows[outcome.end], outcome.token_id, depth)

    def _offer(self, row: Row, log_prob: float, behind: float) -> None:
        if row.depth < self._limits.max_depth and behind >= self._limits.min_path_log_prob:
            heapq.heappush(self._open, (-log_prob, -behind, row))

    def _read_behind(self) -> bool:
        """Read the likeliest nodes from the outcomes on; False when they promise too little."""
        chosen: list[tuple[float, float, Row]] = []
        wanted: list[Row] = []
        least = self._open[0][0] - _LEAST_SHARE if self._open else 0.0
        while self._open and len(wanted) < self._ahead.width and self._open[0][0] <= least:
            item = heapq.heappop(self._open)
            chosen.append(item)
            if self._reader.find(item[2].parent_row, item[2].token_id) is None:
                wanted.append(item[2])
        if wanted:
            if sum(math.exp(-log_prob) for log_prob, _, row in chosen if row in wanted) < self._ahead.min_step_gain:
                return False
            self._steps_left -= 1
            self._reader.read_rows(wanted)
        for log_prob, behind, row in chosen:
            here = self._reader.find(row.parent_row, row.token_id)
            assert here is not None, "it was read just now, or before"
            found = self._reader.children(here)
            for token, value in zip(found.token_ids, found.log_probs, strict=True):
                if value - behind < self._limits.min_path_log_prob:
                    break
                self._offer(Row(here, token, row.depth + 1), value - log_prob, value - behind)
        return bool(chosen)

    def _put_together(self) -> None:
        """Make the trees behind the next few outcomes; those that there is no time for are left out."""
        for _ in range(_TREES_PER_STEP):
            # Each of the others has at least one node.
            room = self._ahead.max_nodes - self._num_nodes - len(self._left) + 1
            if not self._left or room <= 0 or (self._drafts and not self._pace.may_make):
                self.is_over = True
                return
            self._add(self._left.pop(), room)

    def _add(self, outcome: LikelyOutcome, room: int) -> None:
        row = self._row(outcome)
        here = self._reader.find(row.parent_row, row.token_id)
        if here is None:
            return
        tree = self._reader.tree(here, row.depth, self._limits).prune(room)
        if len(tree):
            expected = self._expected
            path = () if outcome.end == ROOT else expected.path(outcome.end)
            assumed = (*(expected.token_ids[node] for node in path), outcome.token_id)
            self._drafts.append(AheadDraft(assumed, min(0.0, outcome.log_prob), tree))
            self._num_nodes += len(tree)
