"""The door, with a clock that a test sets: who gets in, who waits, who is sent away."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import random
from collections.abc import Callable

import pytest

from coppice.core.errors import OverloadedError
from orchestrator.admission.admission import (
    LOOK_S,
    MAX_STARTING_PER_PLACE,
    Admission,
    LongWaitError,
    QueueFullError,
    Ticket,
)
from orchestrator.admission.admission_pace import MIN_SEEN
from orchestrator.admission.fair_queue import MAX_WAITING_BYTES, STAY_S, AdmissionRequest


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def enter(admission: Admission, tenant: str = "", places: int = 1, time_left_s: float = 1e9, tokens: int = 1) -> Ticket:
    return admission.enter(AdmissionRequest(tenant, places), time_left_s, tokens)


def test_as_many_run_as_there_are_places_and_the_others_wait_in_order() -> None:
    admission = Admission(2, 3)
    tickets = [enter(admission) for _ in range(5)]
    assert [ticket.started_s is not None for ticket in tickets] == [True, True, False, False, False]
    assert (admission.num_running, admission.num_waiting) == (2, 3)
    with pytest.raises(OverloadedError, match="2 running, 3 waiting"):
        enter(admission)
    admission.leave(tickets[0])
    assert [ticket.started_s is not None for ticket in tickets] == [True, True, True, False, False]
    for ticket in tickets[1:]:
        admission.leave(ticket)
    assert (admission.num_running, admission.num_waiting) == (0, 0)


def test_a_newcomer_does_not_overtake_a_large_request_that_waits() -> None:
    admission = Admission(3, 9)
    first = enter(admission, places=2)
    large = enter(admission, places=3)
    small = enter(admission)
    assert small.started_s is None
    admission.leave(first)
    assert large.started_s is not None
    assert small.started_s is None
    admission.leave(large)
    assert small.started_s is not None


def test_a_tenant_with_fewer_places_need_not_wait_for_another_ones_large_request() -> None:
    admission = Admission(3, 9)
    enter(admission, "a", places=2)
    large = enter(admission, "a", places=3)
    assert enter(admission, "b").started_s is not None
    assert large.started_s is None


async def test_waiting_ends_when_the_places_come_or_the_waiter_goes() -> None:
    admission = Admission(1, 2)
    running, next_one, cancelled = enter(admission), enter(admission), enter(admission)

    async def wait_in(ticket: Ticket) -> None:
        with ticket:
            await ticket.admitted()

    waits = [asyncio.create_task(wait_in(ticket)) for ticket in (next_one, cancelled)]
    await asyncio.sleep(0)
    waits[1].cancel()
    await asyncio.wait({waits[1]})
    assert admission.num_waiting == 1
    # There is room in the queue again.
    last = enter(admission)
    admission.leave(running)
    await waits[0]
    assert last.started_s is not None
    assert (admission.num_running, admission.num_waiting) == (1, 0)


async def test_one_that_is_cancelled_as_its_place_comes_gives_it_back() -> None:
    admission = Admission(1, 1)
    running, waiting = enter(admission), enter(admission)

    async def wait_in() -> None:
        with waiting:
            await waiting.admitted()

    wait = asyncio.create_task(wait_in())
    await asyncio.sleep(0)
    admission.leave(running)
    wait.cancel()
    await asyncio.wait({wait})
    assert admission.num_running == 0


async def test_a_full_queue_makes_room_for_a_tenant_with_less_than_its_share() -> None:
    admission = Admission(1, 4)
    enter(admission, "flood")
    flood = [enter(admission, "flood") for _ in range(4)]
    for _ in range(2):
        enter(admission, "calm")
    assert [ticket.refusal is not None for ticket in flood] == [False, False, True, True]
    with pytest.raises(OverloadedError, match="needed for other tenants") as caught:
        await flood[3].admitted()
    assert caught.value.retry_after_s > 0
    assert admission.num_waiting == 4
    for tenant in ("flood", "calm"):
        with pytest.raises(OverloadedError, match="the queue is full"):
            enter(admission, tenant)


def run_steadily(admission: Admission, clock: Clock, num_requests: int) -> list[Ticket]:
    """Requests of one second each, two at a time, while three wait; returns those that are left, in order."""
    tickets = [enter(admission) for _ in range(5)]
    for index in range(num_requests):
        clock.now_s += 0.5
        tickets[0].num_tokens = 10
        admission.leave(tickets.pop(0))
        if index + 1 < num_requests:
            tickets.append(enter(admission))
    return tickets


def test_a_request_that_cannot_make_its_deadline_is_refused_at_once_and_one_that_can_is_not() -> None:
    clock = Clock()
    admission = Admission(2, 99, clock=clock)
    run_steadily(admission, clock, 40)
    assert (admission.num_running, admission.num_waiting) == (2, 2)
    # Three places have to come, the last of them a second after the first.
    with pytest.raises(OverloadedError, match=r"needs 1\.05 s at the best recent throughput, and has 1 s") as caught:
        enter(admission, time_left_s=1.0)
    # Three places of four half seconds.
    assert caught.value.retry_after_s == pytest.approx(1.5, rel=0.2)
    # Five tokens more take a quarter of a second more than one.
    with pytest.raises(OverloadedError, match=r"needs 1\.25 s"):
        enter(admission, time_left_s=1.2, tokens=5)
    enter(admission, time_left_s=1.2)
    assert admission.num_waiting == 3


def test_without_a_founded_estimate_nobody_is_refused_early() -> None:
    clock = Clock()
    admission = Admission(2, 99, clock=clock)
    run_steadily(admission, clock, 10)
    assert enter(admission, time_left_s=1e-6).started_s is None
    # Nor where a place is free, whatever is known.
    admission = Admission(2, 99, clock=clock)
    for ticket in run_steadily(admission, clock, 40):
        admission.leave(ticket)
    assert enter(admission, time_left_s=1e-6, tokens=10_000).started_s is not None


def test_who_would_usually_wait_for_too_long_is_refused_at_once() -> None:
    clock = Clock()
    admission = Admission(2, 99, clock=clock, max_wait_s=1.7)
    run_steadily(admission, clock, 40)
    # Two run, a place comes every half second, and two wait; a third does for 1.5 s, and a fourth would for 2.
    enter(admission)
    with pytest.raises(OverloadedError, match=r"is expected to wait 2 s, above the limit of 1\.7 s") as caught:
        enter(admission)
    assert caught.value.retry_after_s == pytest.approx(2.0, rel=0.2)
    # Another tenant's turn comes before the second of those three.
    assert enter(admission, "b").started_s is None


async def test_nobody_waits_for_longer_than_requests_may() -> None:
    admission = Admission(1, 2, max_wait_s=0.05)
    running, waiting = enter(admission), enter(admission)
    with pytest.raises(OverloadedError, match=r"had no place within 0\.05 s") as caught, waiting:
        await waiting.admitted()
    assert caught.value.retry_after_s > 0
    assert (admission.num_running, admission.num_waiting) == (1, 0)
    admission.leave(running)


def test_a_large_request_gets_its_places_where_fewer_may_run_at_once() -> None:
    clock = Clock()
    admission = Admission(4, 99, clock=clock, max_token_s=0.1)
    first = run_steadily(admission, clock, 40)
    # Tokens come at 20 per second in all, so that each of two outputs has one in a tenth of a second.
    assert admission.num_places == 2
    large = enter(admission, places=4)
    for ticket in first:
        assert large.started_s is None
        clock.now_s += 0.5
        admission.leave(ticket)
    assert large.started_s is not None
    assert enter(admission).started_s is None


@pytest.mark.parametrize("seed", range(4))
def test_whoever_is_refused_early_would_have_been_late(seed: int) -> None:
    """A simulation in which who is refused comes in all the same, so that everyone's fate is seen."""
    chooser, clock = random.Random(seed), Clock()
    admission = Admission(4, 10_000, clock=clock)
    running: list[tuple[float, int, Ticket]] = []
    waiting: list[Ticket] = []
    refused: list[tuple[Ticket, float]] = []
    arrival_s = 0.0

    def begin_those_with_a_place() -> None:
        for ticket in [ticket for ticket in waiting if ticket.started_s is not None]:
            waiting.remove(ticket)
            ticket.num_tokens = 20
            heapq.heappush(running, (clock.now_s + chooser.uniform(0.5, 1.5), id(ticket), ticket))

    while running or arrival_s < 200:
        # A little more than four places can take, until the last have come.
        arrival_s += chooser.expovariate(4.4)
        while running and running[0][0] <= arrival_s:
            clock.now_s, _, ended = heapq.heappop(running)
            admission.leave(ended)
            begin_those_with_a_place()
        clock.now_s = arrival_s
        if arrival_s >= 200:
            continue
        time_left_s = chooser.uniform(0.0, 12.0)
        try:
            waiting.append(enter(admission, time_left_s=time_left_s))
        except OverloadedError:
            waiting.append(enter(admission))
            refused.append((waiting[-1], arrival_s + time_left_s))
        begin_those_with_a_place()
    late = [ticket for ticket, due_s in refused if ticket.started_s is not None and ticket.started_s + 0.5 > due_s]
    assert len(refused) > 50
    assert len(late) >= 0.98 * len(refused)


def read_steadily(admission: Admission, clock: Clock, read_s: float) -> None:
    """One prompt after another, as many as it takes to know the pace."""
    for _ in range(MIN_SEEN):
        with enter(admission) as ticket:
            clock.now_s += read_s
            ticket.tokens_came()


def test_no_more_prompts_are_read_at_once_than_have_their_first_tokens_in_time() -> None:
    clock = Clock()
    admission = Admission(100, 100, clock=clock, max_wait_s=0.25)
    read_steadily(admission, clock, 0.1)
    first, second, third = (enter(admission) for _ in range(3))
    assert [one.started_s is not None for one in (first, second, third)] == [True, True, False]
    # A second token is no news.
    clock.now_s += 0.1
    first.tokens_came()
    first.tokens_came()
    assert third.started_s == clock.now_s
    assert enter(admission).started_s is None
    # Who goes without a token makes room, too.
    fifth = enter(admission)
    for ticket in (second, third):
        admission.leave(ticket)
    assert fifth.started_s is not None


def test_who_would_wait_too_long_behind_prompts_is_refused_at_once() -> None:
    clock = Clock()
    admission = Admission(100, 100, clock=clock, max_wait_s=0.25)
    read_steadily(admission, clock, 0.1)
    assert sum(enter(admission).started_s is None for _ in range(4)) == 2
    with pytest.raises(LongWaitError, match=r"is expected to wait 0\.3 s"):
        enter(admission)


def test_what_has_more_to_do_than_read_its_prompt_holds_nobody_up() -> None:
    clock = Clock()
    admission = Admission(100, 100, clock=clock, max_wait_s=0.25)
    read_steadily(admission, clock, 0.1)
    for _ in range(5):
        admission.enter(AdmissionRequest("", 1, only_reads=False), 1e9, 1)
    assert enter(admission).started_s is not None


def test_prompts_are_not_counted_where_nobody_bounds_the_wait() -> None:
    clock = Clock()
    admission = Admission(100, 100, clock=clock)
    read_steadily(admission, clock, 10.0)
    assert all(enter(admission).started_s is not None for _ in range(100))


class Outputs:
    def __init__(self) -> None:
        self.told: list[str] = []

    def pause(self) -> None:
        self.told.append("pause")

    def resume(self) -> None:
        self.told.append("resume")


class Timers:
    def __init__(self) -> None:
        self.waiting: list[tuple[float, Callable[[], None]]] = []

    def __call__(self, delay_s: float, callback: Callable[[], None]) -> None:
        self.waiting.append((delay_s, callback))

    def run(self, clock: Clock, seconds: float) -> None:
        """Let time pass, with each callback at its time."""
        end_s = clock.now_s + seconds
        while self.waiting and clock.now_s + self.waiting[0][0] <= end_s + 1e-9:
            [(delay_s, callback)] = self.waiting
            self.waiting.clear()
            clock.now_s += delay_s
            callback()
        clock.now_s = end_s


def from_peer(admission: Admission, peer: str, places: int = 1) -> Ticket:
    return admission.enter(AdmissionRequest("", places, peer=peer), 1e9, 1)


def test_a_newcomer_has_its_place_at_once_and_those_it_was_taken_from_go_on_later() -> None:
    clock, timers = Clock(), Timers()
    admission = Admission(8, 3, clock=clock, shared_places=4, call_later=timers)
    greedy = [from_peer(admission, "h:1") for _ in range(11)]
    outputs = [Outputs() for _ in greedy]
    for ticket, one in zip(greedy[:8], outputs, strict=False):
        ticket.run(one)
    with pytest.raises(OverloadedError):
        from_peer(admission, "h:1")
    # The queue is full, too, and stays as it is.
    newcomer = from_peer(admission, "h:2")
    assert newcomer.started_s is not None
    assert (admission.num_running, admission.num_paused, admission.num_waiting) == (3, 6, 9)
    assert [one.told for one in outputs[:8]] == [[]] * 2 + [["pause"]] * 6
    assert all(ticket.refusal is None for ticket in greedy)
    # One that is paused may be left.
    admission.leave(greedy[7])
    newcomer.leave()
    newcomer.leave()
    assert (admission.num_running, admission.num_paused) == (2, 5)
    timers.run(clock, STAY_S - LOOK_S)
    assert (admission.num_running, admission.num_paused) == (2, 5)
    timers.run(clock, LOOK_S)
    assert (admission.num_running, admission.num_paused, admission.num_waiting) == (8, 0, 2)
    assert [one.told for one in outputs[:8]] == [[]] * 2 + [["pause", "resume"]] * 5 + [["pause"]]
    for ticket in greedy:
        ticket.leave()
    assert (admission.num_running, admission.num_waiting) == (0, 0)


def test_few_begin_or_go_on_at_once_and_a_crowd_of_one_host_is_not_refused_for_it() -> None:
    clock, timers = Clock(), Timers()
    admission = Admission(64, 36, clock=clock, shared_places=1, call_later=timers)
    crowd = [from_peer(admission, "h:1") for _ in range(100)]
    with pytest.raises(QueueFullError):
        from_peer(admission, "h:1")

    def running() -> list[Ticket]:
        return [ticket for ticket in crowd if ticket.started_s is not None]

    assert running() == crowd[:MAX_STARTING_PER_PLACE]
    for ticket in crowd[:10]:
        ticket.tokens_came()
    assert running() == crowd[: MAX_STARTING_PER_PLACE + 10]
    for ticket in running():
        ticket.run(Outputs())
    # Those that are paused for a newcomer go on by so many, too.
    newcomer = from_peer(admission, "h:2")
    assert newcomer.started_s is not None
    assert running() == crowd[:1]
    newcomer.leave()
    timers.run(clock, STAY_S)
    assert len(running()) == 1 + MAX_STARTING_PER_PLACE
    while len(running()) < 64:
        before = len(running())
        for ticket in running():
            ticket.tokens_came()
        assert len(running()) == min(before + MAX_STARTING_PER_PLACE, 64)


def test_time_in_which_no_request_could_arrive_does_not_make_a_connection_one_that_has_left() -> None:
    clock, timers = Clock(), Timers()
    admission = Admission(8, 8, clock=clock, shared_places=4, call_later=timers)
    greedy = [from_peer(admission, "h:1") for _ in range(8)]
    for ticket in greedy:
        ticket.run(Outputs())
    from_peer(admission, "h:2").leave()
    assert admission.num_running == 2
    # The event loop was busy for ten times as long; requests of others are seen to before it looks.
    clock.now_s += LOOK_S + 10 * STAY_S
    from_peer(admission, "h:1").leave()
    assert admission.num_running == 2
    [(_, look)] = timers.waiting
    timers.waiting.clear()
    look()
    assert admission.num_running == 2
    timers.run(clock, STAY_S)
    assert admission.num_running == 8


def test_who_has_as_much_as_it_may_gets_no_more_while_others_are_there() -> None:
    admission = Admission(8, 8, shared_places=4)
    modest = from_peer(admission, "h:2")
    greedy = [from_peer(admission, "h:1") for _ in range(5)]
    assert [ticket.started_s is not None for ticket in greedy] == [True, True, False, False, False]
    greedy[0].leave()
    assert greedy[2].started_s is not None
    assert greedy[3].started_s is None
    modest.leave()


def test_time_that_an_output_was_paused_does_not_count_as_its_pace() -> None:
    clock, timers = Clock(), Timers()
    admission = Admission(8, 8, clock=clock, shared_places=2, call_later=timers)
    for _ in range(MIN_SEEN):
        tickets = [from_peer(admission, "h:1") for _ in range(2)]
        for ticket in tickets:
            ticket.run(Outputs())
        clock.now_s += 1.0
        newcomer = from_peer(admission, "h:2")
        assert tickets[1].started_s is None
        clock.now_s += 5.0
        newcomer.leave()
        timers.run(clock, STAY_S)
        assert tickets[1].started_s is not None
        assert tickets[1].waited_s == 0
        clock.now_s += 1.0
        for ticket in tickets:
            ticket.num_tokens = 10
            ticket.leave()
    # Of the two, one had its place all along, and the other before and after.
    assert admission.retry_after_s(8) == pytest.approx((7.0 + STAY_S + 2.0) / 2)


def test_nobody_is_sent_away_because_another_connection_is_there() -> None:
    admission = Admission(8, 3, shared_places=2)
    modest = from_peer(admission, "h:2")
    greedy = [from_peer(admission, "h:1") for _ in range(10)]
    assert (admission.num_running, admission.num_waiting) == (2, 9)
    with pytest.raises(OverloadedError, match="the queue is full"):
        from_peer(admission, "h:1")
    assert from_peer(admission, "h:3").started_s is not None
    modest.leave()
    assert all(ticket.refusal is None for ticket in greedy)


def with_bytes(admission: Admission, peer: str, num_bytes: int, tenant: str = "") -> Ticket:
    return admission.enter(AdmissionRequest(tenant, 1, peer=peer, num_bytes=num_bytes), 1e9, 1)


def waiting_until_refused(admission: Admission, peer: str, num_bytes: int) -> list[Ticket]:
    tickets = []
    with contextlib.suppress(QueueFullError):
        while True:
            tickets.append(with_bytes(admission, peer, num_bytes))
    return tickets


def test_the_messages_of_waiting_requests_have_a_bound_in_bytes_that_leaves_others_room() -> None:
    admission = Admission(1, 1_000_000)
    running = with_bytes(admission, "h:1", MAX_WAITING_BYTES)
    size = MAX_WAITING_BYTES // 200
    # Of a host, a connection and a tenant.
    own = waiting_until_refused(admission, "h:1", size)
    assert len(own) == int(200 * 0.75**3)
    # Another connection of the host, and another host.
    assert len(waiting_until_refused(admission, "h:2", size)) > 10
    assert len(waiting_until_refused(admission, "other:1", size)) > 10
    hosts = [f"host{number}:1" for number in range(50)]
    with contextlib.suppress(QueueFullError):
        for host in hosts:
            with_bytes(admission, host, size)
    small = [with_bytes(admission, host, 100) for host in hosts]
    running.leave()
    for ticket in own:
        ticket.leave()
    assert sum(ticket.started_s is not None for ticket in small) <= 1
    assert with_bytes(admission, "h:1", size).started_s is None


def test_a_message_of_any_size_may_wait_alone() -> None:
    admission = Admission(1, 10)
    with_bytes(admission, "h:1", 1)
    with_bytes(admission, "h:1", 2 * MAX_WAITING_BYTES)
    with pytest.raises(QueueFullError, match="no room for a message of this size"):
        with_bytes(admission, "h:1", 1)
