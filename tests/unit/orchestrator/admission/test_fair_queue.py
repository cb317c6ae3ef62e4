"""Whose turn it is: compared with a slow queue that is written as the rule reads, and by what comes of it."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.admission.fair_queue import STAY_S, AdmissionRequest, FairQueue

WEIGHTS = {"b": 2, "c": 3}


@dataclass
class SlowQueue:
    """The rule, word for word: one list of all that wait, searched anew each time."""

    num_places: int
    waiting: list[AdmissionRequest] = field(default_factory=list)
    running: list[AdmissionRequest] = field(default_factory=list)
    turns: list[str] = field(default_factory=list)
    taken: Counter[str] = field(default_factory=Counter)

    def weight(self, tenant: str) -> int:
        return WEIGHTS.get(tenant, 1)

    def in_use(self, tenant: str) -> int:
        return sum(request.num_places for request in self.running if request.tenant == tenant)

    def wait(self, request: AdmissionRequest) -> None:
        if request.tenant not in self.turns:
            self.turns.append(request.tenant)
        self.waiting.append(request)

    def withdraw(self, request: AdmissionRequest) -> None:
        self.waiting.remove(request)
        if not any(other.tenant == request.tenant for other in self.waiting):
            self.turns.remove(request.tenant)
            self.taken.pop(request.tenant, None)

    def take_next(self) -> AdmissionRequest | None:
        shares = {tenant: self.in_use(tenant) / self.weight(tenant) for tenant in self.turns}
        fewest = [tenant for tenant in self.turns if shares[tenant] == min(shares.values())]
        if not fewest:
            return None
        own = [request for request in self.waiting if request.tenant == fewest[0]]
        request = next(request for request in own if request.priority == max(other.priority for other in own))
        if sum(other.num_places for other in self.running) + request.num_places > self.num_places:
            return None
        self.taken[request.tenant] += request.num_places
        self.running.append(request)
        self.withdraw(request)
        if request.tenant in self.turns and self.taken[request.tenant] >= self.weight(request.tenant):
            self.taken[request.tenant] = 0
            self.turns.remove(request.tenant)
            self.turns.append(request.tenant)
        return request


EVENTS = st.one_of(
    st.tuples(st.just("wait"), st.sampled_from("abc"), st.integers(1, 3), st.integers(0, 1)),
    st.tuples(st.just("end"), st.integers(0, 99)),
    st.tuples(st.just("withdraw"), st.integers(0, 99)),
)


@given(num_places=st.integers(3, 6), events=st.lists(EVENTS, max_size=60))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_claims_start_in_the_order_of_the_slow_queue(num_places: int, events: list[tuple]) -> None:  # type: ignore[type-arg]
    fast, slow = FairQueue(WEIGHTS), SlowQueue(num_places)
    for event in events:
        if event[0] == "wait":
            request = AdmissionRequest(*event[1:])
            fast.wait(request)
            slow.wait(request)
        elif event[0] == "end" and slow.running:
            request = slow.running.pop(event[1] % len(slow.running))
            fast.end(request)
        elif event[0] == "withdraw" and slow.waiting:
            request = slow.waiting[event[1] % len(slow.waiting)]
            fast.withdraw(request)
            slow.withdraw(request)
        while (request := slow.take_next()) is not None:
            assert fast.take_next(num_places - fast.num_running) is request
        assert fast.take_next(num_places - fast.num_running) is None
        assert fast.num_running == sum(request.num_places for request in slow.running)
        assert fast.num_waiting == sum(request.num_places for request in slow.waiting)
    assert fast.tenants == {request.tenant for request in (*slow.running, *slow.waiting)}


def test_with_one_place_tenants_take_turns_by_their_weights() -> None:
    queue = FairQueue(WEIGHTS)
    for tenant in "abc":
        for _ in range(12):
            queue.wait(AdmissionRequest(tenant, 1))
    order = ""
    for _ in range(24):
        request = queue.take_next(1)
        assert request is not None
        order += request.tenant
        queue.end(request)
    assert order == "abbccc" * 4


def test_a_tenant_that_holds_all_places_gets_none_until_another_has_as_many() -> None:
    queue = FairQueue()
    held = [AdmissionRequest("greedy", 1) for _ in range(8)]
    for request in held:
        queue.start(request)
    for _ in range(50):
        queue.wait(AdmissionRequest("greedy", 1))
    for _ in range(50):
        queue.wait(AdmissionRequest("modest", 1))
    started = []
    for request in held:
        queue.end(request)
        started.append(queue.take_next(1))
    tenants = [request.tenant for request in started if request is not None]
    assert tenants == ["modest"] * 4 + ["greedy"] * 4


def test_long_requests_do_not_creep_into_all_places() -> None:
    queue, num_places = FairQueue(), 6
    running: list[tuple[int, AdmissionRequest]] = []
    for tenant in ("long", "short"):
        queue.wait(AdmissionRequest(tenant, 1))
    for step in range(300):
        for request in [request for ends, request in running if ends <= step]:
            queue.end(request)
        running = [(ends, request) for ends, request in running if ends > step]
        while (request := queue.take_next(num_places - len(running))) is not None:
            queue.wait(AdmissionRequest(request.tenant, 1))
            running.append((step + (100 if request.tenant == "long" else 1), request))
        counts = Counter(request.tenant for _, request in running)
        assert counts == {"long": 3, "short": 3}


@pytest.mark.parametrize("order", list(itertools.permutations([0, 5, -5])))
def test_within_a_tenant_priority_goes_first_then_arrival(order: tuple[int, ...]) -> None:
    queue = FairQueue()
    requests = [AdmissionRequest("", 1, priority) for priority in (*order, *order)]
    for request in requests:
        queue.wait(request)
    taken = [queue.take_next(9) for _ in requests]
    assert taken == sorted(requests, key=lambda request: -request.priority)


def test_what_is_ahead_are_the_tenants_own_claims_of_no_less_priority() -> None:
    queue = FairQueue()
    for request in (
        AdmissionRequest("a", 3, 1),
        AdmissionRequest("a", 2, 0),
        AdmissionRequest("a", 1, -1),
        AdmissionRequest("b", 7, 9),
    ):
        queue.wait(request)
    assert [queue.ahead_of(AdmissionRequest("a", 1, priority)) for priority in (2, 1, 0, -1)] == [0, 3, 5, 6]
    assert queue.ahead_of(AdmissionRequest("c", 1)) == 0


def test_the_crowd_is_the_end_of_the_longest_queues_and_never_of_a_shorter_one_than_ones_own() -> None:
    queue = FairQueue(WEIGHTS)
    first = [AdmissionRequest("a", 1) for _ in range(4)]
    for request in first:
        queue.wait(request)
    assert queue.crowd(AdmissionRequest("d", 1), 2) == [first[3], first[2]]
    # After two of them, "a" would wait for as little as "d".
    assert queue.crowd(AdmissionRequest("d", 2), 3) == []
    assert queue.crowd(AdmissionRequest("a", 1), 1) == []
    # A tenant of weight 2 may wait for twice as much.
    second = [AdmissionRequest("b", 1) for _ in range(6)]
    for request in second:
        queue.wait(request)
    assert queue.crowd(AdmissionRequest("d", 1), 1) == [first[3]]
    assert queue.num_waiting == 10


@pytest.mark.parametrize("seed", range(20))
def test_what_others_take_before_a_claim_is_foreseen_to_within_a_turn_of_each(seed: int) -> None:
    chooser = random.Random(seed)
    queue = FairQueue(WEIGHTS)
    for tenant in "abcd":
        for _ in range(chooser.randint(0, 12)):
            queue.wait(AdmissionRequest(tenant, 1))
    mine = AdmissionRequest(chooser.choice("abc"), 1)
    foreseen = queue.others_before(mine)
    queue.wait(mine)
    taken = Counter(request.tenant for request in iter(lambda: queue.take_next(1), mine) if request is not None)
    others = {tenant: count for tenant, count in taken.items() if tenant != mine.tenant}
    assert abs(sum(others.values()) - foreseen) <= sum(WEIGHTS.get(tenant, 1) for tenant in "abcd")


def started_in_turn(queue: FairQueue, number: int) -> list[AdmissionRequest]:
    """With one place, the requests that get it one after the other."""
    started = []
    for _ in range(number):
        request = queue.take_next(1)
        assert request is not None
        started.append(request)
        queue.end(request)
    return started


def test_connections_take_turns_whatever_tenants_they_name() -> None:
    queue = FairQueue({"gold": 9})
    for number in range(6):
        queue.wait(AdmissionRequest(f"tenant {number}", 1, peer="h:1"))
        queue.wait(AdmissionRequest("gold", 1, peer="h:2"))
        queue.wait(AdmissionRequest("", 1, peer="h:3"))
    assert Counter(request.peer for request in started_in_turn(queue, 12)) == {"h:1": 4, "h:2": 4, "h:3": 4}


def test_weights_are_those_of_tenants_within_a_connection() -> None:
    queue = FairQueue(WEIGHTS)
    for _ in range(12):
        for tenant in "ac":
            queue.wait(AdmissionRequest(tenant, 1, peer="h:1"))
    assert "".join(request.tenant for request in started_in_turn(queue, 16)) == "accc" * 4


def test_hosts_share_before_their_connections_do() -> None:
    queue = FairQueue()
    for _ in range(20):
        for connection in range(10):
            queue.wait(AdmissionRequest("", 1, peer=f"crowd:{connection}"))
        queue.wait(AdmissionRequest("", 1, peer="[::1]:7"))
    started = started_in_turn(queue, 20)
    assert Counter(request.path[0] for request in started) == {"crowd": 10, "[::1]": 10}
    assert len({request.peer for request in started}) == 11


def test_a_full_queue_makes_room_for_a_connection_with_less_than_its_share() -> None:
    queue = FairQueue()
    crowd = [AdmissionRequest("t", 1, peer=f"crowd:{number % 3}") for number in range(9)]
    calm = AdmissionRequest("", 1, peer="calm:1")
    for request in (*crowd, calm):
        queue.wait(request)
    assert queue.crowd(AdmissionRequest("new", 1, peer="calm:2"), 2) == [crowd[6], crowd[7]]
    # The host has more than its share, this connection has less than those beside it.
    assert queue.crowd(AdmissionRequest("new", 1, peer="crowd:9"), 1) == [crowd[6]]
    assert queue.crowd(AdmissionRequest("t", 1, peer="crowd:0"), 1) == []


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def running(queue: FairQueue, peer: str, number: int, places: int = 1, tenant: str = "") -> list[AdmissionRequest]:
    requests = [AdmissionRequest(tenant or f"t{index}", places, peer=peer) for index in range(number)]
    for request in requests:
        queue.start(request)
        queue.may_pause(request)
    return requests


def excess(queue: FairQueue) -> list[AdmissionRequest]:
    paused = []
    while (request := queue.excess()) is not None:
        queue.pause(request)
        paused.append(request)
    return paused


def test_beside_one_that_asks_for_little_a_connection_is_paused_down_to_its_quota() -> None:
    clock = Clock()
    queue = FairQueue(shared_places=8, clock=clock)
    greedy = running(queue, "h:1", 20, tenant="t")
    assert not excess(queue)
    assert not queue.is_shared
    modest = AdmissionRequest("", 1, peer="h:2")
    queue.wait(modest)
    # The last ones first, so that what is lost is little.
    assert excess(queue) == greedy[:3:-1]
    assert (queue.num_running, queue.num_paused, queue.num_waiting) == (4, 16, 17)
    assert queue.take_next(99) is modest
    assert queue.take_next(99) is None
    # A client that comes again soon meets the same.
    queue.end(modest)
    assert queue.take_next(99) is None
    assert queue.stay_s == STAY_S
    clock.now_s += STAY_S
    # Time in which its request could not have arrived does not count.
    queue.extend_stay(1.0)
    queue.drop_idle()
    assert queue.take_next(99) is None
    clock.now_s += 1.0
    queue.drop_idle()
    assert [queue.take_next(99) for _ in greedy[4:]] == greedy[4:]
    assert (queue.num_running, queue.num_paused, queue.stay_s) == (20, 0, None)


def test_those_who_ask_for_as_much_as_each_other_are_not_paused() -> None:
    for number, each in ((40, 1), (2, 30), (3, 100)):
        queue = FairQueue(shared_places=8)
        for connection in range(number):
            running(queue, f"h:{connection}", each)
        assert not excess(queue)


def test_who_asks_for_more_than_a_part_gets_as_much_for_the_others() -> None:
    queue = FairQueue(shared_places=8)
    running(queue, "h:1", 30)
    running(queue, "h:2", 6)
    excess(queue)
    assert queue.num_running == 12


def test_a_hosts_connections_share_its_quota() -> None:
    queue = FairQueue(shared_places=8)
    for connection in range(10):
        running(queue, f"crowd:{connection}", 3)
    running(queue, "calm:1", 1)
    excess(queue)
    assert queue.num_running == 5


def test_one_claim_of_a_connection_always_runs_however_large() -> None:
    queue = FairQueue(shared_places=8)
    large = running(queue, "h:1", 3, places=16, tenant="t")
    running(queue, "h:2", 1)
    assert excess(queue) == large[:0:-1]
    assert queue.num_running == 17


def test_paused_claims_are_not_sent_away_and_go_on_before_others_of_their_tenant() -> None:
    queue = FairQueue(shared_places=2)
    first, second = running(queue, "h:1", 2, tenant="t")
    late, urgent = AdmissionRequest("t", 1, peer="h:1"), AdmissionRequest("t", 1, 5, peer="h:1")
    queue.wait(late)
    queue.wait(AdmissionRequest("", 1, peer="h:2"))
    assert excess(queue) == [second]
    queue.wait(urgent)
    assert queue.crowd(AdmissionRequest("", 1, peer="h:2"), 2) == []
    assert queue.crowd(AdmissionRequest("", 1, peer="h:2"), 1) == [late]
    queue.end(first)
    order = started_in_turn(queue, 4)
    assert [request for request in order if request.peer == "h:1"] == [urgent, second, late]
