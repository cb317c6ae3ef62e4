"""A model of one verifier and several drafters, to plan for: requests one after another, so many at a time."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from coppice.core.tree import EMPTY_TREE, TokenTree, chain
from orchestrator.planner.adaptive import AdaptivePlanner, AdaptiveRequest
from orchestrator.planner.base import RoundContext, RoundPlan
from orchestrator.request.merge import merge
from orchestrator.request.rounds import Outcome, VerifierLoad

PASS_S = 0.0026
ROW_S = 0.00003
# What a round costs beside its pass.
GAP_S = 0.0002
NUM_PROMPT, NUM_TOKENS = 200, 96
DEPTH = 8
LINGER_US = 60_000


@dataclass(frozen=True)
class Drafter:
    """How often its next token is right, and how long it drafts for one request."""

    right: float
    draft_s: float = 0.004


@dataclass
class _Running:
    request: AdaptiveRequest
    plan: RoundPlan
    # Drafters that are asked for the round; none for the first one, which is the prompt's.
    asked: tuple[str, ...] = ()
    length: int = NUM_PROMPT
    sent: list[TokenTree] = field(default_factory=list)


class SharedCores:
    """Drafters on one core beside the verifier's, where each waits for the others; or each on a core of its own."""

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        num_requests: int = 1,
        seed: int = 0,
        *,
        are_apart: bool = False,
        reading_row_s: float | None = None,
    ) -> None:
        """With `reading_row_s` passes read prompts, whose rows take so much longer where drafters read them, too."""
        self.drafters = dict(drafters)
        # Rounds by the sources that they asked.
        self.rounds: Counter[tuple[str, ...]] = Counter()
        self._choice = tuple(drafters) if len(drafters) > 1 else ()
        self._num_requests = num_requests
        self._are_apart = are_apart
        self._reading_row_s = reading_row_s
        self._random = random.Random(seed)
        self._now_s = 0.0
        self.planner = AdaptivePlanner(15, LINGER_US, clock=lambda: self._now_s)
        self._running: list[_Running] = []
        self._load = VerifierLoad(batch_size=num_requests)

    def run(self, num_tokens: int) -> float:
        """Go on until so many tokens have been said; returns tokens per second, over those of plain decoding."""
        start_s, left = self._now_s, num_tokens
        while left > 0:
            left -= self._pass()
        plain_s = self._pass_s(self._num_requests) + GAP_S
        return num_tokens / (self._now_s - start_s) / (self._num_requests / plain_s)

    def leave(self, name: str) -> None:
        """Let a drafter be gone."""
        del self.drafters[name]
        self._choice = tuple(self.drafters) if len(self.drafters) > 1 else ()
        for one in self._running:
            one.asked = tuple(other for other in one.asked if other != name)

    def share_asked(self, name: str) -> float:
        """Share of the rounds so far that asked it, all of a request's first left out."""
        return sum(count for asked, count in self.rounds.items() if name in asked) / self.rounds.total()

    def _pass_s(self, num_rows: int) -> float:
        return PASS_S + ROW_S * num_rows

    def _pass(self) -> int:
        while len(self._running) < self._num_requests:
            request = self.planner.follow(is_greedy=True)
            self._running.append(_Running(request, self._plan(request)))
        for one in self._running:
            one.sent = self._draft(one) if one.asked else []
        num_rows = sum(1 + sum(map(len, one.sent)) for one in self._running)
        times = [[self.drafters[name].draft_s for name in one.asked] for one in self._running]
        wait_s = max((max if self._are_apart else sum)(one) if one else 0.0 for one in times)
        if self._reading_row_s is None:
            pass_s = self._pass_s(num_rows)
        else:
            num_unread = NUM_PROMPT * sum(one.length == NUM_PROMPT for one in self._running)
            num_rows += num_unread
            is_drafting = any(one.asked for one in self._running)
            pass_s = self._pass_s(num_rows) + is_drafting * self._reading_row_s * num_unread
        self._now_s += GAP_S + wait_s + pass_s
        return sum(self._round_over(one, num_rows, pass_s, wait_s) for one in list(self._running))

    def _round_over(self, one: _Running, num_rows: int, pass_s: float, wait_s: float) -> int:
        [tree] = one.sent or [EMPTY_TREE]
        # Right tokens are counted from one, others are far above.
        num_accepted = max((len(path) for path in tree.paths() if path[-1] <= DEPTH), default=0)
        tokens = (*range(1, num_accepted + 1), 0)
        is_first = one.length == NUM_PROMPT
        if not is_first:
            self.rounds[one.asked] += 1
        outcome = Outcome(
            *(one.length, tokens, num_accepted, len(tree), max(map(len, tree.paths()), default=0), 0, b""),
            *(num_rows, round(1e6 * pass_s), round(1e6 * wait_s) if one.asked else 0, 0),
        )
        sent, asked = one.sent, one.plan.max_nodes > 0
        one.length += len(tokens)
        # The next round is planned before this one teaches anything.
        one.plan = self._plan(one.request)
        one.asked = self._names(one.plan)
        if asked:
            one.request.tree_arrived()
        one.request.round_over(outcome, sent, asked)
        if one.length >= NUM_PROMPT + NUM_TOKENS:
            one.request.close()
            self._running.remove(one)
        return len(tokens)

    def _plan(self, request: AdaptiveRequest) -> RoundPlan:
        return request.plan(RoundContext(has_drafter=True, sources=self._choice), self._load)

    def _names(self, plan: RoundPlan) -> tuple[str, ...]:
        return tuple(name for name in self.drafters if name not in plan.left_out) if plan.max_nodes else ()

    def _draft(self, one: _Running) -> list[TokenTree]:
        trees = []
        for name in one.asked:
            right = self.drafters[name].right
            num_right = next((depth for depth in range(DEPTH) if self._random.random() >= right), DEPTH)
            tokens = [*range(1, num_right + 1), *range(1000 + num_right, 1000 + DEPTH)]
            trees.append(chain(tokens, [math.log(right)] * DEPTH).labelled(name))
        return [one.request.select(merge(trees).prune(one.plan.max_nodes))]
