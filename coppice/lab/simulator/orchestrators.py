"""Time in the model, and a modelled orchestrator: one event loop, which takes one message after another."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from coppice.lab.simulator.machine import Machine
from orchestrator.prefix_cache.drafter import CacheDrafter
from orchestrator.prefix_cache.estimates import CachePromise, HitRates

if TYPE_CHECKING:
    from orchestrator.prefix_cache.recall import Recall
import heapq
import itertools
from collections.abc import Callable

Action = Callable[[], None]


class Clock:
    """Carries out actions in order of time, those of one time in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._numbers = itertools.count()
        self._actions: list[tuple[float, int, Action]] = []

    def later(self, delay_s: float, action: Action) -> None:
        """Carry out `action` so many seconds from now."""
        heapq.heappush(self._actions, (self.now_s + delay_s, next(self._numbers), action))

    def run_until(self, end_s: float) -> None:
        while self.step(end_s):
            pass
        self.now_s = end_s

    def step(self, end_s: float) -> bool:
        """Carry out the next action, unless it comes after `end_s`; whether there was one."""
        if not self._actions or self._actions[0][0] > end_s:
            return False
        self.now_s, _, action = heapq.heappop(self._actions)
        action()
        return True


class _NothingRemembered:
    """Stands for what is remembered of other requests."""

    knows_prompt = False

    def begin(self, tokens: Sequence[int], num_prompt: int) -> None:
        """Ask for what followed the prompt."""

    def advance(self, tokens: Sequence[int]) -> None:
        """Ask for what followed the tokens."""

    def close(self) -> None:
        """Ask for nothing more."""


class OwnContext:
    """What a server's requests know of how often guesses from their own context are right, and of drafters."""

    def __init__(self) -> None:
        self._rates = HitRates()
        self._promise = CachePromise()

    def drafter(self, tokens: Sequence[int], num_prompt: int) -> CacheDrafter:
        """The cache's drafts for a request whose `tokens` grow while it runs, greedily decoded."""
        nothing = cast("Recall", _NothingRemembered())
        return CacheDrafter(
            self._rates, self._promise, lambda _: nothing, lambda _: None, tokens, num_prompt, sampled=False
        )


class SimulatedOrchestrator:
    """Handles messages in the order in which they come, each with whatever follows from it.

    All that it does takes longer where it shares cores, as the machine says.
    """

    def __init__(self, clock: Clock, machine: Machine) -> None:
        self.clock = clock
        self.machine = machine
        self.own_context = OwnContext()
        self._factor = machine.contention.orchestrator_factor
        self._messages: deque[tuple[float, Action]] = deque()
        self._is_busy = False
        # What the message at hand takes beyond what was known before.
        self._more_s = 0.0

    def handle(self, seconds: float, action: Action) -> None:
        """Carry out `action` when so many seconds of work are done, after all that came before."""
        self._messages.append((self._factor * seconds, action))
        self._next()

    def spend(self, seconds: float) -> float:
        """Work for so much longer on the message at hand, if any; returns when that is done, in seconds from now."""
        if not self._is_busy:
            self.handle(seconds, lambda: None)
            return self._factor * seconds
        self._more_s += self._factor * seconds
        return self._more_s

    def _next(self) -> None:
        if self._messages and not self._is_busy:
            self._is_busy = True
            seconds, action = self._messages.popleft()
            self.clock.later(seconds, lambda: self._handled(action))

    def _handled(self, action: Action) -> None:
        action()
        self.clock.later(self._more_s, self._free)

    def _free(self) -> None:
        self._is_busy, self._more_s = False, 0.0
        self._next()
