"""The queue for places: fair among hosts, their connections and tenants, by priority within one."""

from __future__ import annotations

import bisect
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

# For so many seconds after its last request a connection still counts as one that others share with: a client whose
# requests follow one another must not have those of others resumed and paused again between any two of them.
STAY_S = 0.5


@dataclass(frozen=True, eq=False)
class AdmissionRequest:
    """A request for places, one for each of its outputs."""

    tenant: str
    num_places: int
    priority: int = 0
    # Its tenant's share of the places; None: as the queue was told.
    weight: int | None = None
    # Whether its first token follows from reading its prompt alone: a grammar has to be compiled first.
    only_reads: bool = True
    # The connection that it came by, as "host:port"; empty where connections are not told apart.
    peer: str = ""

    @property
    def path(self) -> tuple[str, str, str]:
        """Names of its shares: host, connection, tenant."""
        return self.peer.rpartition(":")[0], self.peer, self.tenant


@dataclass(eq=False)
class _Share:
    """Places of a host, of one of its connections, or of a tenant on one. Tenants have requests, others have parts."""

    name: str = ""
    parent: _Share | None = None
    weight: int = 1
    num_running: int = 0
    num_waiting: int = 0
    parts: dict[str, _Share] = field(default_factory=dict)
    # Parts with requests that wait, in the order of their turns.
    turns: dict[str, None] = field(default_factory=dict)
    # In order: higher priority first, then arrival.
    waiting: list[AdmissionRequest] = field(default_factory=list)
    # Requests that may be paused, in the order of their start.
    pausable: dict[AdmissionRequest, None] = field(default_factory=dict)
    # Places that it may take before its turn is over.
    credit: int = 0

    @property
    def load(self) -> float:
        """Places in use for its weight."""
        return self.num_running / self.weight

    @property
    def demand(self) -> int:
        """Places in use and waited for."""
        return self.num_running + self.num_waiting

    def line(self) -> Iterator[_Share]:
        """It and all shares that it is a part of, without the whole."""
        share = self
        while share.parent is not None:
            yield share
            share = share.parent


class FairQueue:
    """Places in use and requests that wait for some; all numbers count places.

    Places are shared among hosts, what a host has among its connections, and what a connection has among the tenants
    that it names. Next is the host, connection and tenant that has the fewest places in use for its weight; of equals,
    the one whose turn it is. A turn lasts for `weight` places (weighted round robin); hosts and connections have weight
    1. The next request waits for all of its places, and those after it wait with it: a large one must not starve.

    With `shared_places` a host or a connection with others has a quota: its part of so many places, or as many as the
    one of them with the fewest requests asks for, whichever is more. Beyond it none of its requests starts, and the
    last ones that may be paused are to be; one always runs.
    """

    def __init__(
        self,
        weights: Mapping[str, int] | None = None,
        shared_places: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`weights` are those of tenants, by name; with 0 `shared_places` there are no quotas."""
        self._weights = dict(weights or {})
        self._shared_places = shared_places
        self._now_s = clock
        self._all = _Share()
        # Hosts and connections without requests, and since when, in that order.
        self._idle: dict[_Share, float] = {}
        self._paused: set[AdmissionRequest] = set()
        # Of requests that are paused; they wait, too.
        self.num_paused = 0

    @property
    def num_running(self) -> int:
        """Places in use."""
        return self._all.num_running

    @property
    def num_waiting(self) -> int:
        """Places that are waited for."""
        return self._all.num_waiting

    @property
    def is_shared(self) -> bool:
        """Whether there are quotas now."""
        if not self._shared_places:
            return False
        return len(self._all.parts) > 1 or any(len(host.parts) > 1 for host in self._all.parts.values())

    @property
    def tenants(self) -> set[str]:
        """Names of tenants with requests."""
        hosts = self._all.parts.values()
        return {name for host in hosts for connection in host.parts.values() for name in connection.parts}

    @property
    def stay_s(self) -> float | None:
        """How long until the next connection without requests no longer counts; None where there is none."""
        idle_s = next(iter(self._idle.values()), None)
        return None if idle_s is None else max(idle_s + STAY_S - self._now_s(), 0.0)

    def extend_stay(self, late_s: float) -> None:
        """Let connections without requests count for longer, by the time in which no request could arrive."""
        now_s = self._now_s()
        for share, idle_s in self._idle.items():
            self._idle[share] = min(idle_s + late_s, now_s)

    def drop_idle(self) -> None:
        """Forget hosts and connections that have had no requests for `STAY_S`."""
        for share, idle_s in list(self._idle.items()):
            if idle_s + STAY_S > self._now_s():
                return
            del self._idle[share]
            if share.parent is not None:
                del share.parent.parts[share.name]

    def ahead_of(self, request: AdmissionRequest) -> int:
        """Places that the tenant's own requests ahead of this one wait for, itself not counted."""
        parent, name = self._levels(request)[-1]
        tenant = parent.parts.get(name) if parent is not None else None
        waiting = tenant.waiting if tenant is not None else []
        return sum(other.num_places for other in waiting if other.priority >= request.priority and other is not request)

    def others_before(self, request: AdmissionRequest) -> int:
        """Places that others take before this request has its own, by turns; those in use are not looked at."""
        own = before = self.ahead_of(request) + request.num_places
        for (parent, name), weight in zip(reversed(self._levels(request)), (self._weight(request), 1, 1), strict=True):
            turns = before / weight
            others = (parent.parts[other] for other in parent.turns if other != name) if parent is not None else ()
            before += sum(min(other.num_waiting, math.ceil(turns * other.weight)) for other in others)
        return before - own

    def wait(self, request: AdmissionRequest) -> None:
        """Let a request wait for its turn."""
        self._wait(request, bisect.bisect_right)

    def withdraw(self, request: AdmissionRequest) -> None:
        """Let a request wait no longer."""
        tenant = self._tenant(request)
        tenant.waiting.remove(request)
        if request in self._paused:
            self._paused.remove(request)
            self.num_paused -= request.num_places
        for share in self._line(tenant):
            share.num_waiting -= request.num_places
            if not share.num_waiting and share.parent is not None:
                del share.parent.turns[share.name]
        self._forget(tenant)

    def start(self, request: AdmissionRequest) -> None:
        """Give a request its places."""
        for share in self._line(self._tenant(request)):
            share.num_running += request.num_places

    def may_pause(self, request: AdmissionRequest) -> None:
        """A request that has its places may be paused from here on."""
        self._tenant(request).pausable[request] = None

    def end(self, request: AdmissionRequest) -> None:
        """Take a request's places back."""
        tenant = self._tenant(request)
        tenant.pausable.pop(request, None)
        for share in self._line(tenant):
            share.num_running -= request.num_places
        self._forget(tenant)

    def pause(self, request: AdmissionRequest) -> None:
        """Take a request's places back, and let it wait before its tenant's others of the same priority."""
        self._wait(request, bisect.bisect_left)
        self._paused.add(request)
        self.num_paused += request.num_places
        self.end(request)

    def take_next(self, num_free: int) -> AdmissionRequest | None:
        """Start the request whose turn it is; None when none may start, or it needs more than `num_free` places."""
        tenant = self._next(self._all, self._shared_places)
        if tenant is None or tenant.waiting[0].num_places > num_free:
            return None
        request = tenant.waiting[0]
        # Those that lead to the request and have others waiting go on when their turn is over.
        line = list(tenant.line())
        self.start(request)
        self.withdraw(request)
        for share in line:
            share.credit -= request.num_places
            if share.num_waiting and share.credit <= 0 and share.parent is not None:
                share.credit = share.weight
                del share.parent.turns[share.name]
                share.parent.turns[share.name] = None
        return request

    def excess(self) -> AdmissionRequest | None:
        """A request that is to be paused: the last one of the host or connection that is farthest beyond its quota."""
        return self._excess(self._all, self._shared_places)

    def crowd(self, request: AdmissionRequest, num_places: int) -> list[AdmissionRequest]:
        """The last requests of those that wait for more than the share of `request` would: enough for `num_places`.

        Hosts are compared first, then connections of the same host, then tenants. Requests that are paused stay. Empty
        when there are not enough: then `request` is itself what is too much.
        """
        gone: dict[AdmissionRequest, None] = {}
        while sum(other.num_places for other in gone) < num_places:
            victim = self._crowding(request, gone)
            if victim is None:
                return []
            gone[victim] = None
        return list(gone)

    def _crowding(self, request: AdmissionRequest, gone: Mapping[AdmissionRequest, None]) -> AdmissionRequest | None:
        """The request that is sent away after those that are `gone`; None when the one to make room for is too much."""

        def crowding(share: _Share) -> float:
            lost = sum(other.num_places for other in gone if share in self._line(self._tenant(other)))
            return (share.num_waiting - lost) / share.weight

        def last(share: _Share) -> AdmissionRequest | None:
            for part in sorted((share.parts[name] for name in share.turns), key=crowding, reverse=True):
                if (found := last(part)) is not None:
                    return found
            return next((one for one in reversed(share.waiting) if one not in gone and one not in self._paused), None)

        for (parent, name), weight in zip(self._levels(request), (1, 1, self._weight(request)), strict=True):
            if parent is None:
                return None
            own = parent.parts.get(name)
            wanted = (request.num_places + (own.num_waiting if own is not None else 0)) / weight
            others = (parent.parts[other] for other in parent.turns if other != name)
            for other in sorted(others, key=crowding, reverse=True):
                if crowding(other) <= wanted:
                    break
                if (found := last(other)) is not None:
                    return found
        return None

    def _next(self, share: _Share, places: int) -> _Share | None:
        """The tenant whose turn it is within a share that has `places` for its parts, where these have quotas."""
        if share.waiting:
            return share
        quota = self._quota(share, places)
        # Of equals the first is the one whose turn it is.
        for part in sorted((share.parts[name] for name in share.turns), key=lambda part: part.load):
            if quota is None or not part.num_running or part.num_running < quota:
                found = self._next(part, places if quota is None else quota)
                if found is not None:
                    return found
        return None

    def _excess(self, share: _Share, places: int) -> AdmissionRequest | None:
        quota = self._quota(share, places)
        # One request of a part always runs.
        crowded = [part for part in share.parts.values() if part.num_running > 1]
        for part in sorted(crowded, key=lambda part: part.num_running, reverse=True):
            is_beyond = quota is not None and part.num_running > quota
            if is_beyond and (found := _last_pausable(part, part.num_running)) is not None:
                return found
            if share is self._all and (found := self._excess(part, places if quota is None else quota)) is not None:
                return found
        return None

    def _quota(self, share: _Share, places: int) -> int | None:
        """Places that each part of a share may have; None where there is no bound, as among tenants."""
        if not self._shared_places or len(share.parts) < 2 or not self._is_above_tenants(share):
            return None
        fewest = min(part.demand for part in share.parts.values())
        return max(places // len(share.parts), fewest, 1)

    def _is_above_tenants(self, share: _Share) -> bool:
        """Whether its parts are hosts or connections."""
        return share.parent is None or share.parent is self._all

    def _wait(self, request: AdmissionRequest, place: Callable[..., int]) -> None:
        tenant = self._tenant(request)
        for share in self._line(tenant):
            if not share.num_waiting and share.parent is not None:
                share.parent.turns[share.name] = None
                share.credit = share.weight
            share.num_waiting += request.num_places
        rank = place(tenant.waiting, -request.priority, key=lambda other: -other.priority)
        tenant.waiting.insert(rank, request)

    def _line(self, tenant: _Share) -> Iterator[_Share]:
        yield from tenant.line()
        yield self._all

    def _levels(self, request: AdmissionRequest) -> list[tuple[_Share | None, str]]:
        """The shares that lead to a request, each with the name of its part; None where there is none yet."""
        parent: _Share | None = self._all
        levels = []
        for name in request.path:
            levels.append((parent, name))
            parent = parent.parts.get(name) if parent is not None else None
        return levels

    def _tenant(self, request: AdmissionRequest) -> _Share:
        """The share of a request's tenant, made where there is none."""
        share = self._all
        for name in request.path:
            share = share.parts.setdefault(name, _Share(name, share))
            self._idle.pop(share, None)
        # Its latest request's, since it may have been changed.
        share.weight = self._weight(request)
        return share

    def _weight(self, request: AdmissionRequest) -> int:
        return request.weight or self._weights.get(request.tenant, 1)

    def _forget(self, tenant: _Share) -> None:
        """Forget a tenant without requests, and some time later hosts and connections without."""
        for share in tenant.line():
            if share.demand:
                return
            if share is not tenant and self._shared_places:
                self._idle[share] = self._now_s()
            elif share.parent is not None:
                del share.parent.parts[share.name]


def _last_pausable(share: _Share, num_running: int) -> AdmissionRequest | None:
    """The last request of the tenant with most places in use that has fewer than `num_running` places."""
    for part in sorted(share.parts.values(), key=lambda part: part.load, reverse=True):
        if (found := _last_pausable(part, num_running)) is not None:
            return found
    return next((request for request in reversed(share.pausable) if request.num_places < num_running), None)
