"""Drafting ahead: continuations of likely outcomes of the tree under verification, in short steps."""

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

# Path probability below which nodes of the expected tree are not read.
_LEAST_REACH = math.log(0.01)
USUAL_FAN_OUT = FanOut()
# Least probability of a row relative to the likeliest of its step: eight rows take four times as long as one.
_LEAST_SHARE = math.log(0.1)
# Trees assembled per step.
_TREES_PER_STEP = 4
# Most outcomes drafted for.
MOST_OUTCOMES = 24


class Row(NamedTuple):
    """Node to read: its parent's row (-1: end of the committed tokens), token, and depth from 1."""

    parent_row: int
    token_id: int
    depth: int


class Reader(KnownRows, Protocol):
    """Rows read after the committed tokens, and a way to read more."""

    def read_rows(self, rows: Sequence[Row]) -> None:
        """Read nodes whose parents were read, in one forward pass."""
        ...

    def tree(self, row: int, depth: int, limits: TreeLimits) -> TokenTree:
        """Best tree after a row at this depth, from rows already read."""
        ...


@dataclass(frozen=True, slots=True)
class DraftAhead:
    """Limits of drafting ahead.

    At most `max_steps` forward passes per round, of at most `width` rows, each with at least `min_step_gain` expected
    accepted tokens; `max_nodes` over all trees bounds the message. `clock` returns seconds.
    """

    max_steps: int = 0
    width: int = 8
    min_step_gain: float = 0.02
    max_nodes: int = 96
    fan_out: FanOut = USUAL_FAN_OUT
    clock: Callable[[], float] = time.monotonic


class OutcomeSearch:
    """Reads the expected tree's nodes, then its outcomes and their continuations, likeliest first."""

    def __init__(
        self, expected: TokenTree, reader: Reader, limits: TreeLimits, ahead: DraftAhead, pace: AheadPace
    ) -> None:
        """`limits` are those of a draft after an outcome; `max_depth` counts from the committed tokens."""
        self._expected = expected
        self._reader = reader
        self._limits = limits
        self._ahead = ahead
        self._pace = pace
        self._steps_left = ahead.max_steps
        # Known rows of the expected tree's nodes and of the root.
        self._rows: dict[int, int] = {ROOT: ROOT}
        self._outcomes: Sequence[LikelyOutcome] | None = None
        # Candidates to read, likeliest first: negated log-probabilities of the whole path and of its part after the
        # outcome.
        self._open: list[tuple[float, float, Row]] = []
        self._left: list[LikelyOutcome] = []
        self._drafts: list[AheadDraft] = []
        self._num_nodes = 0
        self._is_taken = False
        self.is_over = False

    def step(self) -> bool:
        """Run one forward pass, or assemble a few trees; returns whether there is more to do."""
        if self._outcomes is None and not self._read_expected():
            self._choose_outcomes()
        elif self._outcomes is not None and not (self._may_read and self._read_behind()):
            self._steps_left = 0
            self._put_together()
        return not self.is_over

    def take(self) -> tuple[AheadDraft, ...]:
        """The trees, likeliest outcome first: once, when the search is over."""
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
        """Read nodes of the expected tree; False if none is left that matters."""
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
        """Read the likeliest nodes after the outcomes; False if they promise too little."""
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
            assert here is not None, "it has been read"
            found = self._reader.children(here)
            for token, value in zip(found.token_ids, found.log_probs, strict=True):
                if value - behind < self._limits.min_path_log_prob:
                    break
                self._offer(Row(here, token, row.depth + 1), value - log_prob, value - behind)
        return bool(chosen)

    def _put_together(self) -> None:
        """Assemble the trees after the next few outcomes, as far as time allows."""
        for _ in range(_TREES_PER_STEP):
            # Reserve one node for each of the others.
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
