"""Admission control: outputs that run, requests that wait, requests that are refused."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Protocol

from coppice.core.errors import CoppiceError, OverloadedError
from orchestrator.admission.admission_pace import AdmissionPace
from orchestrator.admission.fair_queue import AdmissionRequest, FairQueue

# Interval in seconds at which paused requests check whether the other connections have left.
LOOK_S = 0.05
# Requests in prefill allowed per shared place: the prefill backlog of one host delays the next request of
# another.
MAX_STARTING_PER_PLACE = 8


class QueueFullError(OverloadedError):
    """The queue is full."""


class NoTimeError(OverloadedError):
    """The request would miss its deadline even at the best recent throughput."""


class LongWaitError(OverloadedError):
    """The wait exceeds, or is expected to exceed, the longest wait allowed."""


class CrowdedOutError(OverloadedError):
    """The place in the queue went to a tenant with fewer requests waiting."""


class Pausable(Protocol):
    """Outputs of a request, as admission control sees them."""

    def pause(self) -> None:
        """Release resources at the verifier and drafters until resumed."""

    def resume(self) -> None: ...


class Ticket:
    """Admission of one request, from arrival to end; leaving it frees its places or its position in the queue.

    Once `run` was called its outputs may be paused to wait for their places again.
    """

    def __init__(self, admission: Admission, request: AdmissionRequest) -> None:
        self._admission = admission
        self.request = request
        self.entered_s = admission.now_s()
        # Time its places were granted; None while it waits.
        self.started_s: float | None = None
        # Seconds it held places before its last pause.
        self.held_before_s = 0.0
        # Seconds it waited for its first places.
        self.waited_s = 0.0
        self._outputs: Pausable | None = None
        self._has_left = False
        self.refusal: CoppiceError | None = None
        # Created by the first waiter.
        self._decided: asyncio.Event | None = None
        # Tokens of the longest output, once one has begun.
        self.num_tokens: int | None = None
        # Cumulative place-seconds, and request-seconds in prefill, of all requests at its start.
        self.used_before_s = 0.0
        self.reading_before_s = 0.0

    def __enter__(self) -> Ticket:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def leave(self) -> None:
        """Free its places or its position in the queue; further calls do nothing."""
        if not self._has_left:
            self._has_left = True
            self._admission.leave(self)

    def run(self, outputs: Pausable) -> None:
        """Register its running outputs: from here on they may be paused for others."""
        if not self._has_left:
            self._outputs = outputs
            self._admission.may_pause(self)

    async def admitted(self) -> None:
        """Wait for its places.

        Raises:
            OverloadedError: it was refused to make room for a tenant with fewer requests waiting, or waited for
                `max_wait_s`.
        """
        if self.started_s is None and self.refusal is None:
            self._decided = asyncio.Event()
            try:
                async with asyncio.timeout(self._patience_s()):
                    await self._decided.wait()
            except TimeoutError as error:
                raise self._admission.waited_too_long(self.request) from error
        if self.refusal is not None:
            raise self.refusal

    @property
    def is_paused(self) -> bool:
        """Whether its outputs have begun and are paused."""
        return self._outputs is not None and self.started_s is None

    def tokens_came(self) -> None:
        """Report its first token: prefill is over. Further calls do nothing unless it was paused since."""
        self._admission.read(self)

    def _patience_s(self) -> float | None:
        longest_s = self._admission.max_wait_s
        return None if longest_s is None else longest_s - (self._admission.now_s() - self.entered_s)

    def decide(self, refusal: CoppiceError | None = None) -> None:
        """Grant its places, or refuse it."""
        if refusal is None:
            self.started_s = self._admission.now_s()
            if self._outputs is None:
                self.waited_s = self.started_s - self.entered_s
            else:
                self._outputs.resume()
        self.refusal = refusal
        if self._decided is not None:
            self._decided.set()

    def pause(self) -> None:
        """Take its places back until the next `decide`."""
        if self.started_s is not None:
            self.held_before_s += self._admission.now_s() - self.started_s
            self.started_s = None
        if self._outputs is not None:
            self._outputs.pause()


class Admission:
    """Shares `max_running` places among requests, with at most `max_queued` outputs waiting.

    `max_token_s` limits concurrency: only as many places as keep the mean time per token (prefill included) under it.
    `max_wait_s` bounds the wait: requests expected to wait longer are refused at once, and concurrent prefills are
    limited to those whose first tokens come within the same time.

    With `shared_places` outputs of a connection are paused while it exceeds its quota (see `FairQueue`), and concurrent
    prefills are limited.
    """

    def __init__(
        self,
        max_running: int,
        max_queued: int,
        weights: Mapping[str, int] | None = None,
        clock: Callable[[], float] = time.monotonic,
        max_token_s: float | None = None,
        max_wait_s: float | None = None,
        shared_places: int = 0,
        call_later: Callable[[float, Callable[[], None]], object] | None = None,
    ) -> None:
        """`call_later` is the event loop's: paused requests resume some time after the other connections have left."""
        self._max_running = max_running
        self._max_queued = max_queued
        self._max_token_s = max_token_s
        self.max_wait_s = max_wait_s
        self._queue = FairQueue(weights, shared_places, clock)
        self._max_starting = shared_places * MAX_STARTING_PER_PLACE
        self._call_later = call_later
        # Time of the next scheduled `_look`; None if none is scheduled.
        self._look_s: float | None = None
        self._waiting: dict[AdmissionRequest, Ticket] = {}
        # Requests that may be paused.
        self._running: dict[AdmissionRequest, Ticket] = {}
        self._pace = AdmissionPace()
        # Requests in prefill: no token since their start or resumption.
        self._reading: set[Ticket] = set()
        # Place-seconds in use and request-seconds in prefill, accumulated until `_used_until_s`; only kept for limits
        # by time.
        self._used_s = 0.0
        self._reading_s = 0.0
        self._used_until_s = clock()
        self.now_s = clock

    @property
    def num_running(self) -> int:
        """Places in use, one for each output."""
        return self._queue.num_running

    @property
    def num_waiting(self) -> int:
        """Outputs waiting for a place, paused ones included."""
        return self._queue.num_waiting

    @property
    def num_paused(self) -> int:
        """Outputs that have begun and are paused for others."""
        return self._queue.num_paused

    @property
    def num_reading(self) -> int:
        """Requests in prefill: no token since their start or resumption."""
        return len(self._reading)

    @property
    def num_places(self) -> int:
        """Current concurrency limit, in outputs."""
        if self._max_token_s is None:
            return self._max_running
        return min(self._pace.places_within(self._max_token_s) or self._max_running, self._max_running)

    def enter(self, request: AdmissionRequest, time_left_s: float, num_tokens: int) -> Ticket:
        """Admit a request or queue it, until its ticket is left.

        It has `time_left_s` until its deadline, and its outputs need at least `num_tokens` tokens each.

        Raises:
            OverloadedError: the queue is full, the expected wait is too long, or the deadline cannot be met even at
                the best recent throughput.
        """
        ticket = Ticket(self, request)
        num_free = self._num_free()
        is_free = not self.num_waiting and not self._queue.is_shared
        if is_free and request.num_places <= num_free and self._may_read():
            self._count_use()
            self._queue.start(request)
            self._begin(ticket)
            self._pause_excess()
            return ticket
        # Its own share may have free places while others wait for theirs, or running requests over quota may be paused.
        self._queue.wait(request)
        self._waiting[request] = ticket
        self._start_waiting()
        if ticket.started_s is not None:
            return ticket
        self._queue.withdraw(request)
        del self._waiting[request]
        num_free = self._num_free()
        num_wanted = self._queue.ahead_of(request) + request.num_places - num_free
        self._check_wait(request, num_wanted)
        needed_s = self._pace.at_least_s(self.now_s(), num_wanted, num_tokens)
        if needed_s > time_left_s:
            text = f"needs {needed_s:.3g} s at the best recent throughput, and has {time_left_s:.3g} s"
            raise self._overloaded(NoTimeError, text, request)
        if not self._queue.has_bytes_for(request):
            raise self._overloaded(QueueFullError, "the queue has no room for a message of this size", request)
        self._make_room(request)
        self._queue.wait(request)
        self._waiting[request] = ticket
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Free a ticket's places or its position in the queue."""
        request = ticket.request
        self._forget_reading(ticket)
        self._running.pop(request, None)
        if ticket.started_s is not None:
            now_s = self.now_s()
            self._count_use()
            if ticket.num_tokens is not None:
                held_s = ticket.held_before_s + now_s - ticket.started_s
                self._learn(ticket, now_s, held_s, ticket.num_tokens)
            if self._waiting:
                self._pace.given_back(now_s, request.num_places)
            self._queue.end(request)
        elif self._waiting.pop(request, None) is not None:
            self._queue.withdraw(request)
        self._start_waiting()

    def may_pause(self, ticket: Ticket) -> None:
        """Let a running request be paused from here on."""
        self._queue.may_pause(ticket.request)
        self._running[ticket.request] = ticket
        self._pause_excess()

    def read(self, ticket: Ticket) -> None:
        """Record the end of a prefill and start the next."""
        if ticket not in self._reading or ticket.started_s is None:
            return
        read_s = self.now_s() - ticket.started_s
        self._forget_reading(ticket)
        # Not of one that was paused: the verifier may still have cached its KV blocks.
        if read_s > 0 and not ticket.held_before_s:
            self._pace.prompt_read(read_s, (self._reading_s - ticket.reading_before_s) / read_s)
        self._start_waiting()

    def retry_after_s(self, num_places: int = 1) -> float:
        """Expected seconds until `num_places` are free for a new request."""
        return self._pace.retry_after_s(self.num_waiting + num_places, self.num_places)

    def waited_too_long(self, request: AdmissionRequest) -> OverloadedError:
        """Error for a request that has waited for `max_wait_s`."""
        return self._overloaded(LongWaitError, f"had no place within {self.max_wait_s:.3g} s", request)

    def _num_free(self) -> int:
        """Free places; all of them if none is in use, so that a request larger than the current limit can run."""
        return (self.num_places if self.num_running else self._max_running) - self.num_running

    def _most_reading(self) -> int | None:
        """Limit on concurrent prefills; None without a limit."""
        return None if self.max_wait_s is None else self._pace.prompts_within(self.max_wait_s)

    def _may_read(self) -> bool:
        if self._max_starting and len(self._reading) >= self._max_starting:
            return False
        most = self._most_reading()
        return most is None or len(self._reading) < most

    def _forget_reading(self, ticket: Ticket) -> None:
        if ticket in self._reading:
            self._count_use()
            self._reading.discard(ticket)

    def _pause_excess(self) -> None:
        if self._look_s is None:
            self._queue.drop_idle()
        while (request := self._queue.excess()) is not None:
            ticket = self._running.pop(request)
            self._forget_reading(ticket)
            self._count_use()
            self._queue.pause(request)
            self._waiting[request] = ticket
            ticket.pause()
        if self._waiting and self._look_s is None and self._call_later is not None:
            stay_s = self._queue.stay_s
            if stay_s is not None:
                delay_s = min(stay_s, LOOK_S)
                self._look_s = self.now_s() + delay_s
                self._call_later(delay_s, self._look)

    def _look(self) -> None:
        """Resume paused requests if the connections they made room for have stayed away.

        A late timer means a busy event loop, which delays their next requests too: that time is not counted.
        """
        if self._look_s is not None:
            self._queue.extend_stay(max(self.now_s() - self._look_s, 0.0))
            self._look_s = None
        self._start_waiting()

    def _start_waiting(self) -> None:
        self._pause_excess()
        while self._waiting:
            if not self._may_read():
                return
            self._count_use()
            request = self._queue.take_next(self._num_free())
            if request is None:
                return
            self._begin(self._waiting.pop(request))
        self._pace.nobody_waits()

    def _begin(self, ticket: Ticket) -> None:
        if ticket.is_paused:
            self._queue.may_pause(ticket.request)
            self._running[ticket.request] = ticket
        else:
            ticket.used_before_s, ticket.reading_before_s = self._used_s, self._reading_s
        if ticket.request.only_reads:
            self._reading.add(ticket)
        ticket.decide()

    def _count_use(self) -> None:
        """Accumulate place-seconds and prefill-seconds before either count changes."""
        if self._max_token_s is not None or self.max_wait_s is not None:
            now_s = self.now_s()
            self._used_s += (now_s - self._used_until_s) * self.num_running
            self._reading_s += (now_s - self._used_until_s) * len(self._reading)
            self._used_until_s = now_s

    def _learn(self, ticket: Ticket, now_s: float, held_s: float, num_tokens: int) -> None:
        self._pace.ended(now_s, held_s, num_tokens)
        if self._max_token_s is not None and held_s > 0:
            self._pace.shared(held_s, num_tokens, (self._used_s - ticket.used_before_s) / held_s)

    def _check_wait(self, request: AdmissionRequest, num_wanted: int) -> None:
        """Refuse a request whose expected wait exceeds `max_wait_s`."""
        if self.max_wait_s is None:
            return
        others = self._queue.others_before(request)
        wait_s = self._pace.usual_wait_s(num_wanted + others, self.num_places)
        if (most := self._most_reading()) is not None:
            # After prefills under way and queued requests, most of which have one place each.
            num_read = len(self._reading) + self._queue.ahead_of(request) + others + 1 - most
            wait_s = max(wait_s, self._pace.reading_wait_s(num_read))
        if wait_s > self.max_wait_s:
            text = f"is expected to wait {wait_s:.3g} s, above the limit of {self.max_wait_s:.3g} s"
            raise self._overloaded(LongWaitError, text, request)

    def _make_room(self, request: AdmissionRequest) -> None:
        """Make room for the request in the queue, if need be by refusing others with more than their share."""
        # Free places count as room to wait: requests about to start need no place in the queue.
        num_missing = self.num_waiting + request.num_places - self._max_queued - max(self._num_free(), 0)
        if num_missing <= 0:
            return
        crowd = self._queue.crowd(request, num_missing)
        if not crowd:
            raise self._overloaded(QueueFullError, "the queue is full", request)
        for other in crowd:
            self._queue.withdraw(other)
            refusal = self._overloaded(CrowdedOutError, "the queue was needed for other tenants", other)
            self._waiting.pop(other).decide(refusal)

    def _overloaded(self, kind: type[OverloadedError], reason: str, request: AdmissionRequest) -> OverloadedError:
        text = f"{reason}; {self.num_running} running, {self.num_waiting} waiting"
        return kind(text, self.retry_after_s(request.num_places))
