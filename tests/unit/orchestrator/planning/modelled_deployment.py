"""A discrete-event model of a verifier, a drafter and their load: what a planner's plans come to, without a clock.

The verifier's rules are those of `verifier_svc`: a pass starts when every running sequence has its draft, else at the
first deadline; who still waits for a draft then stays out; late drafts and what rounds leave over are re-rooted. One
drafter serves all sequences, one after another. On a shared machine it takes its time from the passes beside it.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from coppice.tree import EMPTY_TREE, ROOT, TokenTree
from orchestrator.planner import Planner, RequestPlanner, RoundPlan, Situation
from orchestrator.rounds import Outcome

# Measured for the bundled target behind 256 tokens: rows, and milliseconds of the pass.
PASS_ROWS = (1, 8, 16, 32, 64, 128, 256)
PASS_MS = (5.1, 6.5, 8.0, 11.8, 14.7, 28.0, 50.0)
ROW_MULTIPLE = 4


def pass_s(num_rows: int) -> float:
    """Time of a pass, interpolated between measured ones; beyond them a row costs what the last ones did."""
    rows = -(-num_rows // ROW_MULTIPLE) * ROW_MULTIPLE
    if rows <= PASS_ROWS[-1]:
        return float(np.interp(rows, PASS_ROWS, PASS_MS)) / 1000
    slope = (PASS_MS[-1] - PASS_MS[-2]) / (PASS_ROWS[-1] - PASS_ROWS[-2])
    return (PASS_MS[-1] + slope * (rows - PASS_ROWS[-1])) / 1000


@dataclass(frozen=True)
class Machine:
    """What things take in the model. `contention`: seconds that a second of drafting adds to the pass beside it."""

    draft_s: float = 0.002
    draft_node_s: float = 0.0001
    read_token_s: float = 0.0001
    message_s: float = 0.0003
    sequence_s: float = 0.0001
    contention: float = 0.5
    noise: float = 0.05


@dataclass(frozen=True)
class Text:
    """How predictable the text is: the drafter's chance to be right with its first child, and with its second.

    `confidence` is what the drafter makes of it, as a power of the truth: below 1 it promises too much.
    """

    first: float = 0.88
    second: float = 0.06
    spread: float = 0.1
    confidence: float = 1.0


class ModelledRequest:
    """One running request: its text, its plan and its mailbox."""

    def __init__(self, planner: RequestPlanner, text: Text, seed: int, now_s: float) -> None:
        self.planner = planner
        self._text = text
        self._random = random.Random(seed)
        # By position: the chance of the likeliest token, 1, and the token that the target says.
        self._chances: list[float] = []
        self._said: list[int] = []
        self.length = 0
        self.num_rounds = 0
        self.is_running = True
        self.plan = RoundPlan(0, 0)
        self.asked = False
        self.num_read = -256
        self.tree: TokenTree | None = None
        self.is_fresh = False
        self.mean_accepted = 0.0
        self.last_outcome_s = now_s
        self._misses = self._pause = 0

    def chances(self, position: int) -> tuple[float, float]:
        """What the first and the second child at a position are worth."""
        self._say(position)
        return self._chances[position], min(self._text.second, 1 - self._chances[position])

    def said(self, first: int, last: int) -> list[int]:
        """What the target says from one position to before another."""
        self._say(last)
        return self._said[first:last]

    @property
    def has_draft(self) -> bool:
        return self.tree is not None and (self.is_fresh or self.tree.expected_tokens >= 0.6 * self.mean_accepted)

    @property
    def deadline_s(self) -> float:
        waits = self.num_rounds > 0 and self._pause == 0
        return self.last_outcome_s + (self.plan.linger_us / 1e6 if waits else 0.0)

    def put(self, base: int, tree: TokenTree) -> None:
        """Take a draft in, re-rooted if it is late."""
        left = tree.descend(self.said(base, self.length))
        if base == self.length:
            self.tree, self.is_fresh = tree, True
        elif len(left) and not self.is_fresh:
            self.tree = left

    def round_over(self, tree: TokenTree, num_accepted: int, now_s: float) -> None:
        """Go on behind a round's tokens, with the verifier's own patience for silent drafters."""
        committed = self.said(self.length, self.length + num_accepted + 1)
        if len(tree) and self.is_fresh:
            self.mean_accepted += 0.2 * (num_accepted - self.mean_accepted)
        left = EMPTY_TREE if self.tree is None else self.tree.descend(committed)
        self.tree, self.is_fresh = (left if len(left) else None), False
        self.length += len(committed)
        self.num_rounds += 1
        self.last_outcome_s = now_s
        if len(tree):
            self._misses = self._pause = 0
        elif self._pause:
            self._pause -= 1
        elif self.plan.linger_us and self.num_rounds > 1:
            self._misses += 1
            if self._misses >= 2:
                self._pause = min(64, 2**self._misses)

    def _say(self, position: int) -> None:
        text = self._text
        while len(self._said) <= position:
            first = min(0.99, max(0.02, text.first + self._random.uniform(-text.spread, text.spread)))
            draw = self._random.random()
            self._chances.append(first)
            self._said.append(1 if draw < first else 2 if draw < first + text.second else 0)


class Deployment:
    """Runs requests under a planner; `tokens` counts what was committed, and `now_s` is the model's clock."""

    def __init__(
        self,
        planner: Callable[[Callable[[], float]], Planner],
        mode: str = "auto",
        machine: Machine = Machine(),
        text: Text = Text(),
        seed: int = 0,
    ) -> None:
        self.now_s = 0.0
        self.planner, self.mode = planner(lambda: self.now_s), mode
        self.machine, self.text = machine, text
        self.tokens = self.passes = self.rows = self.rounds = self.asked_rounds = 0
        self.drafting_s = 0.0
        # By number of the pass: how much slower than usual it is.
        self.slow_passes: dict[int, float] = {}
        self.requests: list[ModelledRequest] = []
        self._random = random.Random(seed)
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._drafts_wanted: deque[ModelledRequest] = deque()
        self._is_drafting = False
        self._in_pass: list[tuple[ModelledRequest, TokenTree, float]] = []
        self._pass_rows = 0
        self._pass_s = 0.0

    def set_load(self, num_requests: int, text: Text | None = None) -> None:
        """Start or end requests until so many run."""
        for request in self.requests[num_requests:]:
            request.is_running = False
            request.planner.close()
        self.requests = self.requests[:num_requests]
        while len(self.requests) < num_requests:
            request = ModelledRequest(
                self.planner.follow(is_greedy=True), text or self.text, self._random.getrandbits(32), self.now_s
            )
            self.requests.append(request)
            self._plan(request)
        self._later(0.0, self._look)

    def run(self, seconds: float) -> float:
        """Go on for so long; returns tokens per second."""
        before, end_s = self.tokens, self.now_s + seconds
        while self._events and self._events[0][0] <= end_s:
            self.now_s, _, action = heapq.heappop(self._events)
            action()
        self.now_s = end_s
        return (self.tokens - before) / seconds

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_s + delay_s, next(self._numbers), action))

    def _look(self) -> None:
        """Start a pass if one may start."""
        if self._in_pass or not self.requests:
            return
        if all(request.has_draft for request in self.requests):
            start_s = self.now_s
        else:
            start_s = min(request.deadline_s for request in self.requests)
        if start_s > self.now_s + 1e-9:
            self._later(start_s - self.now_s, self._look)
            return
        ready = [request for request in self.requests if request.has_draft or request.deadline_s <= self.now_s + 1e-9]
        self._in_pass = [
            (
                request,
                (request.tree or EMPTY_TREE).prune(request.plan.max_nodes or 15),
                self.now_s - request.last_outcome_s,
            )
            for request in ready
        ]
        self._pass_rows = sum(1 + len(tree) for _, tree, _ in self._in_pass)
        slow = math.exp(self._random.gauss(0, self.machine.noise)) * self.slow_passes.get(self.passes, 1.0)
        plain_s = pass_s(self._pass_rows) * slow
        # What drafters have to do while the pass runs, they take from it.
        busy_s = min(plain_s, self._draft_backlog_s())
        self._pass_s = plain_s + self.machine.contention * busy_s
        self._later(self._pass_s + self.machine.sequence_s * len(ready), self._end_pass)

    def _draft_backlog_s(self) -> float:
        usual_s = self.machine.draft_s + 10 * self.machine.draft_node_s
        return usual_s * (len(self._drafts_wanted) + self._is_drafting)

    def _end_pass(self) -> None:
        in_pass, self._in_pass = self._in_pass, []
        self.passes += 1
        self.rows += self._pass_rows
        for request, tree, waited_s in in_pass:
            if request.is_running:
                self._end_round(request, tree, waited_s)
        self._look()

    def _end_round(self, request: ModelledRequest, tree: TokenTree, waited_s: float) -> None:
        accepted = _accepted(tree, request.said(request.length, request.length + tree.depth))
        outcome = Outcome(
            base_length=256 + request.length,
            token_ids=tuple(request.said(request.length, request.length + accepted + 1)),
            num_accepted=accepted,
            draft_nodes=len(tree),
            draft_depth=tree.depth,
            redraft_nodes=0,
            features=b"",
            pass_rows=self._pass_rows,
            pass_us=round(1e6 * self._pass_s),
            linger_us=round(1e6 * waited_s),
            stale_drafts=0,
        )
        self.tokens += accepted + 1
        self.rounds += 1
        asked = request.asked
        self.asked_rounds += asked
        request.round_over(tree, accepted, self.now_s)
        self._plan(request)
        request.planner.round_over(outcome, [tree] if len(tree) else [], asked)

    def _plan(self, request: ModelledRequest) -> None:
        has_drafter = self.mode != "off"
        situation = Situation(has_drafter, forced=self.mode == "forced", row_multiple=ROW_MULTIPLE)
        request.plan = request.planner.plan(situation)
        request.asked = has_drafter and request.plan.max_nodes > 0
        if request.asked:
            self._later(self.machine.message_s, lambda: self._ask(request))

    def _ask(self, request: ModelledRequest) -> None:
        if request not in self._drafts_wanted:
            self._drafts_wanted.append(request)
        self._draft_next()

    def _draft_next(self) -> None:
        while self._drafts_wanted and not self._is_drafting:
            request = self._drafts_wanted.popleft()
            if not request.is_running:
                continue
            base, tree = request.length, self._draft(request)
            seconds = self.machine.draft_s + self.machine.draft_node_s * len(tree)
            seconds += self.machine.read_token_s * (base - request.num_read)
            request.num_read = base
            self._is_drafting = True
            self.drafting_s += seconds
            self._later(seconds, self._drafted)
            self._later(seconds + self.machine.message_s, lambda r=request, b=base, t=tree: self._on_tree(r, b, t))

    def _drafted(self) -> None:
        self._is_drafting = False
        self._draft_next()

    def _on_tree(self, request: ModelledRequest, base: int, tree: TokenTree) -> None:
        if not request.is_running or not request.plan.max_nodes:
            return
        request.planner.tree_arrived()
        request.put(base, request.planner.select(tree) if base == request.length else tree)
        self._look()

    def _draft(self, request: ModelledRequest) -> TokenTree:
        """The best tree by the drafter's own belief, down to 12 %, and filled up to the multiple of rows."""
        confidence, multiple = self.text.confidence, request.plan.row_multiple
        tokens: list[int] = []
        parents: list[int] = []
        logs: list[float] = []
        numbers = itertools.count()
        found: list[tuple[float, int, float, int, int, int]] = []

        def add(parent: int, cost: float, depth: int) -> None:
            for token, chance in enumerate(request.chances(request.length + depth), start=1):
                log = confidence * math.log(chance)
                heapq.heappush(found, (cost - log, next(numbers), log, parent, token, depth + 1))

        add(ROOT, 0.0, 0)
        while found and len(tokens) < request.plan.max_nodes:
            cost, _, log, parent, token, depth = heapq.heappop(found)
            fills = (1 + len(tokens)) % multiple != 0
            if math.exp(-cost) < (0.03 if fills else 0.12):
                break
            add(len(tokens), cost, depth)
            tokens.append(token)
            parents.append(parent)
            logs.append(log)
        return TokenTree(tuple(tokens), tuple(parents), tuple(logs), ("model",))


def _accepted(tree: TokenTree, said: list[int]) -> int:
    """How many nodes the target follows."""
    node, accepted = ROOT, 0
    for token in said:
        child = tree.children.get((node, token))
        if child is None:
            break
        node, accepted = child, accepted + 1
    return accepted
