"""Rounds of running requests, for those who watch them; a round that is not watched costs one look."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from coppice.core.errors import OverloadedError, UnavailableError
from coppice.core.tree import ROOT, TokenTree
from coppice.v1 import inference_pb2
from orchestrator.planner.base import RoundPlan
from orchestrator.request.merge import merge
from orchestrator.request.rounds import Outcome
from orchestrator.request.statistics import verified_tree

# Rounds kept for a watch that is not read; the oldest go first. And watches of one tenant.
MAX_UNREAD = 256
MAX_WATCHES = 16
RETRY_AFTER_S = 5.0


@dataclass(frozen=True)
class EndedRound:
    """One round of one output: trees sent for it, the merged one before any cut, and the plan it was made by."""

    tenant: str
    request_id: str
    output_index: int
    # Unix time, and microseconds since the output's last watched round; 0 for the first.
    time_s: float
    round_us: int
    outcome: Outcome
    sent: tuple[TokenTree, ...]
    offered: TokenTree
    plan: RoundPlan

    def nodes(self) -> tuple[TokenTree, list[inference_pb2.NodeState]]:
        """All nodes drafted for the round, verified ones first, and the state of each."""
        count = self.outcome.draft_nodes
        verified = verified_tree(self.sent, count) if count and self.sent else self.offered.first(0)
        tree = merge([verified, self.offered])
        states = [inference_pb2.NODE_STATE_REJECTED] * len(verified)
        states += [inference_pb2.NODE_STATE_PRUNED] * (len(tree) - len(verified))
        node = ROOT
        for token in self.outcome.token_ids[: self.outcome.num_accepted]:
            child = verified.children.get((node, token))
            if child is None:
                break
            states[child] = inference_pb2.NODE_STATE_ACCEPTED
            node = child
        return tree, states


class RoundFeed:
    """Passes rounds on to all watches. Only used on the event loop."""

    def __init__(self) -> None:
        self._watches: set[RoundWatch] = set()
        self._by_account: Counter[str] = Counter()
        self._is_closed = False

    @property
    def is_watched(self) -> bool:
        """Whether there is a watch."""
        return bool(self._watches)

    def output(self, tenant: str, request_id: str, output_index: int) -> OutputRounds:
        """Rounds of a new output."""
        return OutputRounds(self, tenant, request_id, output_index)

    def publish(self, one: EndedRound) -> None:
        """Queue a round for each watch that sees it."""
        for watch in self._watches:
            watch.add(one)

    @contextlib.contextmanager
    def watch(self, account: str, tenant: str | None, request_id: str = "") -> Iterator[RoundWatch]:
        """Watch the requests of a tenant (None: of all), or one of them, on account of a caller.

        Raises:
            OverloadedError: the account has `MAX_WATCHES` already.
            UnavailableError: the feed is closed.
        """
        if self._is_closed:
            raise UnavailableError("the server is stopping")
        if self._by_account[account] >= MAX_WATCHES:
            raise OverloadedError(f"{MAX_WATCHES} of your calls watch rounds already", RETRY_AFTER_S)
        watch = RoundWatch(tenant, request_id)
        self._watches.add(watch)
        self._by_account[account] += 1
        try:
            yield watch
        finally:
            self._watches.discard(watch)
            self._by_account[account] -= 1

    def close(self) -> None:
        """End all watches: they last as long as their callers, and a server waits for its calls."""
        self._is_closed = True
        for watch in self._watches:
            watch.close()


class RoundWatch:
    """Unread rounds of one caller."""

    def __init__(self, tenant: str | None, request_id: str) -> None:
        self._tenant = tenant
        self._request_id = request_id
        self._unread: deque[EndedRound] = deque()
        self._news = asyncio.Event()
        self._is_closed = False
        # Rounds lost since `take_missed`.
        self._num_missed = 0

    def add(self, one: EndedRound) -> None:
        """Queue a round if the caller sees it."""
        if self._tenant not in (None, one.tenant) or self._request_id not in ("", one.request_id):
            return
        if len(self._unread) == MAX_UNREAD:
            self._unread.popleft()
            self._num_missed += 1
        self._unread.append(one)
        self._news.set()

    def close(self) -> None:
        """End it."""
        self._is_closed = True
        self._news.set()

    def take_missed(self) -> int:
        """Rounds lost since the last call."""
        missed, self._num_missed = self._num_missed, 0
        return missed

    async def next(self, timeout_s: float) -> EndedRound | None:
        """The oldest unread round; None if there is none within the timeout.

        Raises:
            UnavailableError: the feed is closed.
        """
        if not self._unread:
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._news.wait()
        if self._is_closed:
            raise UnavailableError("the server is stopping")
        return self._unread.popleft() if self._unread else None


class OutputRounds:
    """Rounds of one output on their way to the feed."""

    def __init__(self, feed: RoundFeed, tenant: str, request_id: str, output_index: int) -> None:
        self._feed = feed
        self._tenant = tenant
        self._request_id = request_id
        self._output_index = output_index
        self._last_s: float | None = None

    def round_over(self, outcome: Outcome, sent: Sequence[TokenTree], offered: TokenTree, plan: RoundPlan) -> None:
        """Publish a round, if there is a watch."""
        if not self._feed.is_watched:
            self._last_s = None
            return
        now_s = time.monotonic()
        round_us = 0 if self._last_s is None else round(1e6 * (now_s - self._last_s))
        self._last_s = now_s
        self._feed.publish(
            EndedRound(
                self._tenant,
                self._request_id,
                self._output_index,
                time.time(),
                round_us,
                outcome,
                tuple(sent),
                offered,
                plan,
            )
        )
