"""Waiting for a better tree: with several drafters, the first tree need not begin the round at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence

from coppice.core.tree import ROOT, TokenTree
from orchestrator.request.source_records import SourceRecords

# Trees are compared on this many tokens after their base.
COMPARED_TOKENS = 16
# Share of the verifier's linger for which a tree may be held; it must be sent before that ends.
_SHARE_OF_LINGER = 0.8
# Upper bound of pending committed lengths.
_MOST_ASKED = 64
# Weight of a round in the request's own rate.
_RATE = 0.2


class AskTimes:
    """Times at which the first drafter was told of an outcome, by committed length."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._times: dict[int, float] = {}

    def note(self, length: int) -> None:
        """Record that a drafter is told of this committed length now."""
        if length not in self._times:
            if len(self._times) >= _MOST_ASKED:
                del self._times[next(iter(self._times))]
            self._times[length] = self._clock()

    def elapsed_s(self, length: int) -> float | None:
        """Seconds since `note(length)`; None without one."""
        asked_s = self._times.get(length)
        return None if asked_s is None else self._clock() - asked_s


class BetterTrees:
    """Decides whether a request's tree is held for another, possibly better one, and for how long.

    Drafters run concurrently, and the first tree, mostly the smallest drafter's, would begin the round. Only the tree
    is held; the verifier starts without one when its linger ends.
    """

    def __init__(
        self, records: SourceRecords, release: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`release` is called if the awaited trees do not come."""
        self._records = records
        self._release = release
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None
        # Trees by committed length and source.
        self._trees: dict[int, dict[str, TokenTree]] = {}
        # Sources that have drafted for this request; the first tree may include a prompt's prefill.
        self._have_drafted: set[str] = set()
        self._last_s: float | None = None
        self._tokens = self._seconds = 0.0

    @property
    def are_awaited(self) -> bool:
        """Whether a tree is held now."""
        return self._timer is not None

    def came(self, source: str, base_length: int, tree: TokenTree, took_s: float | None, length: int) -> None:
        """Record a source's tree for `base_length`, in time or late; `length` tokens are committed now."""
        if took_s is not None and source in self._have_drafted:
            self._records.took(source, took_s)
        self._have_drafted.add(source)
        if length - COMPARED_TOKENS < base_length <= length:
            self._trees.setdefault(base_length, {})[source] = tree

    def await_for(
        self, there: Collection[str], asked: Collection[str], took_s: float | None, linger_s: float, num_requests: int
    ) -> bool:
        """Whether to hold the trees that are there for those of other asked sources; if so, starts the timer.

        `linger_s` is the verifier's linger, `num_requests` the number of requests that wait together.
        """
        self.let_go()
        missing = [source for source in asked if source not in there and source in self._have_drafted]
        if not missing or took_s is None or not self._seconds:
            return False
        tokens_per_s = max(1, num_requests) * self._tokens / self._seconds
        wait_s = self._records.worthwhile_wait_s(there, missing, took_s, tokens_per_s)
        wait_s = min(wait_s, _SHARE_OF_LINGER * linger_s - took_s)
        if wait_s <= 0:
            return False
        self._records.num_waits += 1
        self._timer = asyncio.get_running_loop().call_later(wait_s, self._give_up)
        return True

    def let_go(self) -> None:
        """Stop holding."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def committed(self, num_new: int, tokens: Sequence[int]) -> None:
        """Record a round with `num_new` new tokens at the end, and compare trees once enough tokens are known."""
        now_s = self._clock()
        if self._last_s is not None:
            self._tokens += num_new - _RATE * self._tokens
            self._seconds += now_s - self._last_s - _RATE * self._seconds
        self._last_s = now_s
        for length in [length for length in self._trees if length + COMPARED_TOKENS <= len(tokens)]:
            trees = self._trees.pop(length)
            if len(trees) > 1:
                following = tokens[length : length + COMPARED_TOKENS]
                self._records.compare({source: _num_right(tree, following) for source, tree in trees.items()})

    def _give_up(self) -> None:
        self._timer = None
        self._release()


def _num_right(tree: TokenTree, tokens: Sequence[int]) -> int:
    """Number of leading `tokens` that the tree contains as a path."""
    node = ROOT
    for number, token in enumerate(tokens):
        child = tree.children.get((node, token))
        if child is None:
            return number
        node = child
    return len(tokens)
