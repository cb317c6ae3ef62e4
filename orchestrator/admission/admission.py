"""The door: how many requests run, who waits, and who is sent away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Protocol

from coppice.core.errors import CoppiceError, OverloadedError
from orchestrator.admission.admission_pace import AdmissionPace
from orchestrator.admission.fair_queue import AdmissionRequest, FairQueue

# How often it is looked whether others have left.
LOOK_S = 0.05
# Requests for each shared place that may be without a token since they began or went on: what one host begins at once
# is what the next request of another has to wait for.
MAX_STARTING_PER_PLACE = 8


class QueueFullError(OverloadedError):
    """There is no place in the queue."""


class NoTimeError(OverloadedError):
    """Even at the best pace of late the request's time would not suffice."""


class LongWaitError(OverloadedError):
    """It would have to wait for longer than requests may here, or has."""


class CrowdedOutError(OverloadedError):
    """The place in the queue was needed for a tenant with fewer requests there."""


class Pausable(Protocol):
    """What runs in a request's places."""

    def pause(self) -> None:
        """Give up what it holds at the back ends, and go on from there when it is resumed."""

    def resume(self) -> None: ...


class Ticket:
    """One request, from its arrival to its end; leaving it gives back what it has, or its place in the queue.

    Once its outputs run they may be paused, and wait for their places anew: see `run`.
    """

    def __init__(self, admission: Admission, request: AdmissionRequest) -> None:
        self._admission = admission
        self.request = request
        self.entered_s = admission.now_s()
        # When it got its places; None while it waits.
        self.started_s: float | None = None
        # How long it had had them before they were last taken back.
        self.held_before_s = 0.0
        # How long it had to wait for its first places.
        self.waited_s = 0.0
        self._outputs: Pausable | None = None
        self._has_left = False
        self.refusal: CoppiceError | None = None
        # Made when somebody waits for it.
        self._decided: asyncio.Event | None = None
        # Of the longest output, once they have begun.
        self.num_tokens: int | None = None
        # Place-seconds, and seconds of prompts being read, of all requests up to its start.
        self.used_before_s = 0.0
        self.reading_before_s = 0.0

    def __enter__(self) -> Ticket:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def leave(self) -> None:
        """Give everything back; further calls do nothing."""
        if not self._has_left:
            self._has_left = True
            self._admission.leave(self)

    def run(self, outputs: Pausable) -> None:
        """Its outputs run from here on, and may be paused whenever others need what they have."""
        if not self._has_left:
            self._outputs = outputs
            self._admission.may_pause(self)

    async def admitted(self) -> None:
        """Return once it has its places.

        Raises:
            OverloadedError: it had to make room in the queue for a tenant with fewer requests there, or has waited for
                as long as requests may.
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
        """Whether its outputs have begun, and wait."""
        return self._outputs is not None and self.started_s is None

    def tokens_came(self) -> None:
        """Its prompt has been read; further calls do nothing unless it was paused since."""
        self._admission.read(self)

    def _patience_s(self) -> float | None:
        longest_s = self._admission.max_wait_s
        return None if longest_s is None else longest_s - (self._admission.now_s() - self.entered_s)

    def decide(self, refusal: CoppiceError | None = None) -> None:
        """Give it its places, or send it away."""
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
        """Its places are taken back, until it is decided anew."""
        if self.started_s is not None:
            self.held_before_s += self._admission.now_s() - self.started_s
            self.started_s = None
        if self._outputs is not None:
            self._outputs.pause()


class Admission:
    """Shares `max_running` places among requests, of which up to `max_queued` outputs may wait.

    With `max_token_s` there are only as many places as outputs have a token in that time each, by the pace of late, the
    prompt's time included. With `max_wait_s` nobody waits for longer, and who would usually have to is refused at once;
    and no more prompts are read at once than have their first tokens within as long again, so that whoever got in does
    not wait behind a crowd of them.

    With `shared_places` outputs of a connection are paused while it has more than its quota with others (FairQueue),
    and few requests begin or go on at once.
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
        """`call_later` is the event loop's: what was paused goes on by itself some time after others have left."""
        self._max_running = max_running
        self._max_queued = max_queued
        self._max_token_s = max_token_s
        self.max_wait_s = max_wait_s
        self._queue = FairQueue(weights, shared_places, clock)
        self._max_starting = shared_places * MAX_STARTING_PER_PLACE
        self._call_later = call_later
        # When it will be seen whether others have left; None: nobody waits for that.
        self._look_s: float | None = None
        self._waiting: dict[AdmissionRequest, Ticket] = {}
        # Those that may be paused.
        self._running: dict[AdmissionRequest, Ticket] = {}
        self._pace = AdmissionPace()
        # Requests without a token since they began or went on.
        self._reading: set[Ticket] = set()
        # Times that places have been in use and prompts read, added up until `_used_until_s`; kept where bounds by time
        # are asked for.
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
        """Outputs that wait for a place, those that are paused among them."""
        return self._queue.num_waiting

    @property
    def num_paused(self) -> int:
        """Outputs that have begun, and wait until others have had what they need."""
        return self._queue.num_paused

    @property
    def num_reading(self) -> int:
        """Requests that have had no token since they began or went on."""
        return len(self._reading)

    @property
    def num_places(self) -> int:
        """Outputs that may run at once now."""
        if self._max_token_s is None:
            return self._max_running
        return min(self._pace.places_within(self._max_token_s) or self._max_running, self._max_running)

    def enter(self, request: AdmissionRequest, time_left_s: float, num_tokens: int) -> Ticket:
        """Let a request in, or have it wait; leaving the ticket ends both.

        It has `time_left_s`, and its outputs are not over before they have `num_tokens` tokens.

        Raises:
            OverloadedError: the queue is full, or its wait would usually be too long, or even at the best pace of late
                its time would not suffice.
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
        # Its share may have places free where others wait for theirs, or what others have beyond their quota.
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
            text = f"would take {needed_s:.3g} s at the best pace of late, and has {time_left_s:.3g} s"
            raise self._overloaded(NoTimeError, text, request)
        self._make_room(request)
        self._queue.wait(request)
        self._waiting[request] = ticket
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Take back what a ticket has."""
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
        """A request that has its places may be paused from here on."""
        self._queue.may_pause(ticket.request)
        self._running[ticket.request] = ticket
        self._pause_excess()

    def read(self, ticket: Ticket) -> None:
        """A prompt has been read: the next one may be."""
        if ticket not in self._reading or ticket.started_s is None:
            return
        read_s = self.now_s() - ticket.started_s
        self._forget_reading(ticket)
        # The verifier may still have the tokens of one that was paused.
        if read_s > 0 and not ticket.held_before_s:
            self._pace.prompt_read(read_s, (self._reading_s - ticket.reading_before_s) / read_s)
        self._start_waiting()

    def retry_after_s(self, num_places: int = 1) -> float:
        """When it is worth asking for places again."""
        return self._pace.retry_after_s(self.num_waiting + num_places, self.num_places)

    def waited_too_long(self, request: AdmissionRequest) -> OverloadedError:
        """What to tell a request that has waited for `max_wait_s`."""
        return self._overloaded(LongWaitError, f"had no place within {self.max_wait_s:.3g} s", request)

    def _num_free(self) -> int:
        """Places that may be taken; all where none is in use, so that a large request gets its own some day."""
        return (self.num_places if self.num_running else self._max_running) - self.num_running

    def _most_reading(self) -> int | None:
        """Prompts that may be read at once; None where nothing bounds them."""
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
        """What is paused because of others goes on some time after they have left.

        While the event loop is busy their next requests are late, too: that time does not count.
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
        """Add up the use of places and what is read, before it changes."""
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
        """Check that a request that has to wait may expect its places in time."""
        if self.max_wait_s is None:
            return
        others = self._queue.others_before(request)
        wait_s = self._pace.usual_wait_s(num_wanted + others, self.num_places)
        if (most := self._most_reading()) is not None:
            # After those that are read now and those that wait, most of which have one place each.
            num_read = len(self._reading) + self._queue.ahead_of(request) + others + 1 - most
            wait_s = max(wait_s, self._pace.reading_wait_s(num_read))
        if wait_s > self.max_wait_s:
            text = f"would usually wait {wait_s:.3g} s, and {self.max_wait_s:.3g} s is the most"
            raise self._overloaded(LongWaitError, text, request)

    def _make_room(self, request: AdmissionRequest) -> None:
        """Make the request fit the queue, if need be by sending away others that crowd it."""
        # Empty places are room to wait: nobody is sent away because others are there, too, or begin just now.
        num_missing = self.num_waiting + request.num_places - self._max_queued - max(self._num_free(), 0)
        if num_missing <= 0:
            return
        crowd = self._queue.crowd(request, num_missing)
        if not crowd:
            raise self._overloaded(QueueFullError, "there is no place", request)
        for other in crowd:
            self._queue.withdraw(other)
            refusal = self._overloaded(CrowdedOutError, "the queue was needed for other tenants", other)
            self._waiting.pop(other).decide(refusal)

    def _overloaded(self, kind: type[OverloadedError], reason: str, request: AdmissionRequest) -> OverloadedError:
        text = f"{reason}; {self.num_running} requests are running already, {self.num_waiting} wait"
        return kind(text, self.retry_after_s(request.num_places))
