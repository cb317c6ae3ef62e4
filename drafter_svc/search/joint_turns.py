"""Turns of sequences that wait for the model thread: as many at once as the drafter makes drafts together."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from drafter_svc.drafters.base import Drafter, JointDrafter
from drafter_svc.model.cache_budget import CacheBudget
from drafter_svc.model.model_thread import ModelThread

Turn: TypeAlias = Callable[[], None]


class JointTurns:
    """Submits turns to the thread. Each comes when it would have come by itself, or with an earlier one."""

    def __init__(self, drafter: Drafter, thread: ModelThread, caches: CacheBudget) -> None:
        self._joint = drafter.joint if isinstance(drafter, JointDrafter) else None
        self._thread = thread
        self._caches = caches
        self._turns: deque[Turn] = deque()

    @property
    def num_joint_passes(self) -> int:
        """Passes that were made for several drafts."""
        return 0 if self._joint is None else self._joint.num_joint

    def submit(self, turn: Turn) -> None:
        """Take a turn, each of another sequence. Any thread may call this."""
        self._turns.append(turn)
        self._thread.submit(self._take)

    def _take(self) -> None:
        """The next turns, unless they have been taken with those before them. On the model thread."""
        if not self._turns:
            return
        first = self._turns.popleft()
        if self._joint is None:
            first()
            return
        turns = [first]
        while self._turns and len(turns) < self._joint.most:
            turns.append(self._turns.popleft())
        # A sequence in the midst of its draft must not be made to forget what it has read.
        with self._caches.held():
            self._joint.together(turns)
