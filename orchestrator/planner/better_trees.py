"""Waiting for the better tree: of one request's drafters, a quick one's tree need not begin the round at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence

from coppice.core.tree import ROOT, TokenTree
from orchestrator.planner.source_records import SourceRecords

# Trees are compared by so many tokens after the length that they were made for.
COMPARED_TOKENS = 16
# The share of the verifier's own wait that a tree may be kept for: it has to be there before that ends.
_SHARE_OF_LINGER = 0.8
# Weight of a round in the request's own pace.
_RATE = 0.2


class BetterTrees:
    """Decides whether a tree waits for another one, which may be the better, and sees to it that it does not for long.

    Several drafters draft at the same time, and whichever tree comes first would begin the round: mostly that of the
    least drafter. What waits is only that tree; the verifier starts without any when its linger ends.
    """

    def __init__(
        self, records: SourceRecords, release: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`release` is called when what was waited for has not come."""
        self._records = records
        self._release = release
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None
        # By committed length: each source's tree for it.
        self._trees: dict[int, dict[str, TokenTree]] = {}
        # Sources that have drafted for this request: before its first tree one may have a prompt to read.
        self._have_drafted: set[str] = set()
        self._last_s: float | None = None
        self._tokens = self._seconds = 0.0

    @property
    def are_awaited(self) -> bool:
        """Whether a tree that has come waits now."""
        return self._timer is not None

    def came(self, source: str, base_length: int, tree: TokenTree, took_s: float | None, length: int) -> None:
        """A source's tree for a committed length has come, in time or late: there are `length` tokens now."""
        if took_s is not None and source in self._have_drafted:
            self._records.took(source, took_s)
        self._have_drafted.add(source)
        if length - COMPARED_TOKENS < base_length <= length:
            self._trees.setdefault(base_length, {})[source] = tree

    def await_for(
        self, there: Collection[str], asked: Collection[str], took_s: float | None, linger_s: float, num_requests: int
    ) -> bool:
        """Whether the trees that are there wait for those of others that were asked; from then on they do.

        `linger_s` is how long the verifier waits for a tree, `num_requests` how many requests wait with this one.
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
        """Nothing waits any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def committed(self, num_new: int, tokens: Sequence[int]) -> None:
        """A round is over: so many of these tokens are new. Compare the trees that enough is known for."""
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
    """How many of these tokens in a row the tree has."""
    node = ROOT
    for number, token in enumerate(tokens):
        child = tree.children.get((node, token))
        if child is None:
            return number
        node = child
    return len(tokens)
