"""The door: how many requests run, who waits, and who is sent away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from types import TracebackType

from coppice.errors import CoppiceError, OverloadedError
from orchestrator.fair_queue import Claim, FairQueue
from orchestrator.pace import Pace


class QueueFullError(OverloadedError):
    """There is no place in the queue."""


class NoTimeError(OverloadedError):
    """Even at the best pace of late the request's time would not suffice."""


class CrowdedOutError(OverloadedError):
    """The place in the queue was needed for a tenant with fewer requests there."""


class Ticket:
    """One request's claim, from the door to its end; leaving it gives back what it has, or its place in the queue."""

    def __init__(self, admission: Admission, claim: Claim) -> None:
        self._admission = admission
        self.claim = claim
        self.entered_s = admission.now_s()
        # When it got its places; None while it waits.
        self.started_s: float | None = None
        self.refusal: CoppiceError | None = None
        # Made when somebody waits for it.
        self._decided: asyncio.Event | None = None
        # Of the longest output, once they have begun.
        self.num_tokens: int | None = None

    def __enter__(self) -> Ticket:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._admission.leave(self)

    @property
    def waited_s(self) -> float:
        """How long it had to wait for its places."""
        return 0.0 if self.started_s is None else self.started_s - self.entered_s

    async def admitted(self) -> None:
        """Return once it has its places.

        Raises:
            OverloadedError: it had to make room in the queue for a tenant with fewer requests there.
        """
        if self.started_s is None and self.refusal is None:
            self._decided = asyncio.Event()
            await self._decided.wait()
        if self.refusal is not None:
            raise self.refusal

    def decide(self, refusal: CoppiceError | None = None) -> None:
        """Give it its places, or send it away."""
        if refusal is None:
            self.started_s = self._admission.now_s()
        self.refusal = refusal
        if self._decided is not None:
            self._decided.set()


class Admission:
    """Shares `max_running` places among requests, of which up to `max_queued` outputs may wait."""

    def __init__(
        self,
        max_running: int,
        max_queued: int,
        weights: Mapping[str, int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_running = max_running
        self._max_queued = max_queued
        self._queue = FairQueue(weights)
        self._waiting: dict[Claim, Ticket] = {}
        self._pace = Pace()
        self.now_s = clock

    @property
    def num_running(self) -> int:
        """Places in use, one for each output."""
        return self._queue.num_running

    @property
    def num_waiting(self) -> int:
        """Outputs that wait for a place."""
        return self._queue.num_waiting

    def enter(self, claim: Claim, time_left_s: float, num_tokens: int) -> Ticket:
        """Let a request in, or have it wait; leaving the ticket ends both.

        It has `time_left_s`, and its outputs are not over before they have `num_tokens` tokens.

        Raises:
            OverloadedError: the queue is full, or even at the best pace of late its time would not suffice.
        """
        ticket = Ticket(self, claim)
        num_free = self._max_running - self.num_running
        if not self.num_waiting and claim.num_places <= num_free:
            self._queue.start(claim)
            ticket.decide()
            return ticket
        num_wanted = self._queue.ahead_of(claim) + claim.num_places - num_free
        needed_s = self._pace.at_least_s(self.now_s(), num_wanted, num_tokens)
        if needed_s > time_left_s:
            text = f"would take {needed_s:.3g} s at the best pace of late, and has {time_left_s:.3g} s"
            raise self._overloaded(NoTimeError, text, claim)
        self._make_room(claim)
        self._queue.wait(claim)
        self._waiting[claim] = ticket
        # Another tenant's claim may be too large for the places that are free, and this one not.
        self._start_waiting()
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Take back what a ticket has."""
        claim = ticket.claim
        if ticket.started_s is not None:
            now_s = self.now_s()
            if ticket.num_tokens is not None:
                self._pace.ended(now_s, now_s - ticket.started_s, ticket.num_tokens)
            if self._waiting:
                self._pace.given_back(now_s, claim.num_places)
            self._queue.end(claim)
        elif self._waiting.pop(claim, None) is not None:
            self._queue.withdraw(claim)
        self._start_waiting()

    def retry_after_s(self, num_places: int = 1) -> float:
        """When it is worth asking for places again."""
        return self._pace.retry_after_s(self.num_waiting + num_places, self._max_running)

    def _start_waiting(self) -> None:
        while (claim := self._queue.take_next(self._max_running - self.num_running)) is not None:
            self._waiting.pop(claim).decide()
        if not self._waiting:
            self._pace.nobody_waits()

    def _make_room(self, claim: Claim) -> None:
        """See to it that a claim fits the queue, if need be by sending others away that crowd it."""
        num_missing = self.num_waiting + claim.num_places - self._max_queued
        if num_missing <= 0:
            return
        crowd = self._queue.crowd(claim, num_missing)
        if not crowd:
            raise self._overloaded(QueueFullError, "there is no place", claim)
        for other in crowd:
            self._queue.withdraw(other)
            refusal = self._overloaded(CrowdedOutError, "the queue was needed for other tenants", other)
            self._waiting.pop(other).decide(refusal)

    def _overloaded(self, kind: type[OverloadedError], reason: str, claim: Claim) -> OverloadedError:
        text = f"{reason}; {self.num_running} requests are running already, {self.num_waiting} wait"
        return kind(text, self.retry_after_s(claim.num_places))
