"""Queue for places: fair among hosts, their connections and tenants, by priority within a tenant."""

from __future__ import annotations

import bisect
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

# Seconds after its last request for which a connection still counts for quotas, or a client with successive requests
# would have others resumed and paused again in between.
STAY_S = 0.5
# Bytes of the waiting requests' messages; in memory a request takes up to about 20 times as many.
MAX_WAITING_BYTES = 16 * 1024 * 1024
# Part of the free bytes that a share may have.
_BYTES_SHARE = 0.75


@dataclass(frozen=True, eq=False)
class AdmissionRequest:
    """A request for places, one for each of its outputs."""

    tenant: str
    num_places: int
    priority: int = 0
    # Its tenant's weight; None: the queue's setting.
    weight: int | None = None
    # Whether its first token needs prefill only; a grammar must be compiled first.
    only_reads: bool = True
    # Client's connection, "host:port"; empty if connections are not told apart.
    peer: str = ""
    # Size of its message.
    num_bytes: int = 0

    @property
    def path(self) -> tuple[str, str, str]:
        """Names of its shares: host, connection, tenant."""
        return self.peer.rpartition(":")[0], self.peer, self.tenant


@dataclass(eq=False)
class _Share:
    """Node of the share tree: the root, a host, a connection, or a tenant (a leaf, which holds the requests)."""

    name: str = ""
    parent: _Share | None = None
    weight: int = 1
    num_running: int = 0
    num_waiting: int = 0
    # Of the messages of waiting requests.
    waiting_bytes: int = 0
    parts: dict[str, _Share] = field(default_factory=dict)
    # Parts with waiting requests, in round-robin order.
    turns: dict[str, None] = field(default_factory=dict)
    # Waiting requests: higher priority first, then by arrival.
    waiting: list[AdmissionRequest] = field(default_factory=list)
    # Requests that may be paused, in the order of their start.
    pausable: dict[AdmissionRequest, None] = field(default_factory=dict)
    # Places left in its turn (weighted round robin).
    credit: int = 0

    @property
    def load(self) -> float:
        """Places in use per weight."""
        return self.num_running / self.weight

    @property
    def demand(self) -> int:
        """Places in use plus places waited for."""
        return self.num_running + self.num_waiting

    def line(self) -> Iterator[_Share]:
        """Itself and its ancestors, without the root."""
        share = self
        while share.parent is not None:
            yield share
            share = share.parent


class FairQueue:
    """Places in use and the queue for them; all counts are places.

    Places are shared among hosts, then among a host's connections, then among the tenants that a connection names. The
    next host, connection and tenant is the one with the fewest places in use per weight; ties go by weighted round
    robin, with turns of `weight` places (hosts and connections have weight 1). The next request waits for all of its
    places, and later ones wait with it: large requests must not starve.

    With `shared_places` a host or connection with siblings has a quota: an equal part of that many places, or the
    demand of its least loaded sibling if that is more. Above its quota none of its requests starts, and its latest
    pausable requests are paused; one always runs.
    """

    def __init__(
        self,
        weights: Mapping[str, int] | None = None,
        shared_places: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`weights` are those of tenants, by name; without `shared_places` there are no quotas."""
        self._weights = dict(weights or {})
        self._shared_places = shared_places
        self._now_s = clock
        self._all = _Share()
        # Hosts and connections without requests, with the time they became so, oldest first.
        self._idle: dict[_Share, float] = {}
        self._paused: set[AdmissionRequest] = set()
        # Places of paused requests, which are also waiting.
        self.num_paused = 0

    @property
    def num_running(self) -> int:
        """Places in use."""
        return self._all.num_running

    @property
    def num_waiting(self) -> int:
        """Places waited for."""
        return self._all.num_waiting

    @property
    def is_shared(self) -> bool:
        """Whether quotas apply: more than one host, or more than one connection of a host."""
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
        """Seconds until the next idle connection is dropped; None if there is none."""
        idle_s = next(iter(self._idle.values()), None)
        return None if idle_s is None else max(idle_s + STAY_S - self._now_s(), 0.0)

    def extend_stay(self, late_s: float) -> None:
        """Extend the stay of idle connections by the time in which no request could arrive."""
        now_s = self._now_s()
        for share, idle_s in self._idle.items():
            self._idle[share] = min(idle_s + late_s, now_s)

    def drop_idle(self) -> None:
        """Forget hosts and connections that have been idle for `STAY_S`."""
        for share, idle_s in list(self._idle.items()):
            if idle_s + STAY_S > self._now_s():
                return
            del self._idle[share]
            if share.parent is not None:
                del share.parent.parts[share.name]

    def has_bytes_for(self, request: AdmissionRequest) -> bool:
        """Whether the message of a waiting request finds room.

        A host may have three quarters of what others leave, a connection three quarters of what the host's others leave
        of that, and so a tenant: newcomers find room (dynamic thresholds, Choudhury and Hahne, 1998). One of any size
        finds room where none waits.
        """
        if not self._all.waiting_bytes:
            return True
        room: float = MAX_WAITING_BYTES
        share = self._all
        for name in request.path:
            part = share.parts.get(name, _Share())
            room = _BYTES_SHARE * (room - (share.waiting_bytes - part.waiting_bytes))
            if part.waiting_bytes + request.num_bytes > room:
                return False
            share = part
        return True

    def ahead_of(self, request: AdmissionRequest) -> int:
        """Places waited for by the tenant's requests before this one."""
        parent, name = self._levels(request)[-1]
        tenant = parent.parts.get(name) if parent is not None else None
        waiting = tenant.waiting if tenant is not None else []
        return sum(other.num_places for other in waiting if other.priority >= request.priority and other is not request)

    def others_before(self, request: AdmissionRequest) -> int:
        """Places that go to others' waiting requests before this one, by round robin; running ones do not count."""
        own = before = self.ahead_of(request) + request.num_places
        for (parent, name), weight in zip(reversed(self._levels(request)), (self._weight(request), 1, 1), strict=True):
            turns = before / weight
            others = (parent.parts[other] for other in parent.turns if other != name) if parent is not None else ()
            before += sum(min(other.num_waiting, math.ceil(turns * other.weight)) for other in others)
        return before - own

    def wait(self, request: AdmissionRequest) -> None:
        """Queue a request."""
        self._wait(request, bisect.bisect_right)

    def withdraw(self, request: AdmissionRequest) -> None:
        """Remove a request from the queue."""
        tenant = self._tenant(request)
        tenant.waiting.remove(request)
        if request in self._paused:
            self._paused.remove(request)
            self.num_paused -= request.num_places
        for share in self._line(tenant):
            share.num_waiting -= request.num_places
            share.waiting_bytes -= request.num_bytes
            if not share.num_waiting and share.parent is not None:
                del share.parent.turns[share.name]
        self._forget(tenant)

    def start(self, request: AdmissionRequest) -> None:
        """Count a request's places as in use."""
        for share in self._line(self._tenant(request)):
            share.num_running += request.num_places

    def may_pause(self, request: AdmissionRequest) -> None:
        """Let a running request be paused from here on."""
        self._tenant(request).pausable[request] = None

    def end(self, request: AdmissionRequest) -> None:
        """Free a request's places."""
        tenant = self._tenant(request)
        tenant.pausable.pop(request, None)
        for share in self._line(tenant):
            share.num_running -= request.num_places
        self._forget(tenant)

    def pause(self, request: AdmissionRequest) -> None:
        """Free a request's places and queue it before its tenant's others of the same priority."""
        self._wait(request, bisect.bisect_left)
        self._paused.add(request)
        self.num_paused += request.num_places
        self.end(request)

    def take_next(self, num_free: int) -> AdmissionRequest | None:
        """Start the next request; None if none may start or it needs more than `num_free` places."""
        tenant = self._next(self._all, self._shared_places)
        if tenant is None or tenant.waiting[0].num_places > num_free:
            return None
        request = tenant.waiting[0]
        # Shares whose turn is over and that still have requests waiting move to the end of the round.
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
        """Request to pause next: the latest of the host or connection that exceeds its quota by most."""
        return self._excess(self._all, self._shared_places)

    def crowd(self, request: AdmissionRequest, num_places: int) -> list[AdmissionRequest]:
        """Latest waiting requests, `num_places` in total, of shares that wait for more than that of `request` would.

        Compares hosts first, then connections of the host, then tenants. Paused requests are exempt. Empty if the
        others' excess is not enough: then `request` itself exceeds its share.
        """
        gone: dict[AdmissionRequest, None] = {}
        while sum(other.num_places for other in gone) < num_places:
            victim = self._crowding(request, gone)
            if victim is None:
                return []
            gone[victim] = None
        return list(gone)

    def _crowding(self, request: AdmissionRequest, gone: Mapping[AdmissionRequest, None]) -> AdmissionRequest | None:
        """Next request to refuse, given those already `gone`; None if `request` itself exceeds its share."""

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
        """Tenant whose request starts next within a share of `places` places; None if quotas stop all of them."""
        if share.waiting:
            return share
        quota = self._quota(share, places)
        # The sort is stable: ties keep the round-robin order.
        for part in sorted((share.parts[name] for name in share.turns), key=lambda part: part.load):
            if quota is None or not part.num_running or part.num_running < quota:
                found = self._next(part, places if quota is None else quota)
                if found is not None:
                    return found
        return None

    def _excess(self, share: _Share, places: int) -> AdmissionRequest | None:
        quota = self._quota(share, places)
        # One request of each part always runs.
        crowded = [part for part in share.parts.values() if part.num_running > 1]
        for part in sorted(crowded, key=lambda part: part.num_running, reverse=True):
            is_beyond = quota is not None and part.num_running > quota
            if is_beyond and (found := _last_pausable(part, part.num_running)) is not None:
                return found
            if share is self._all and (found := self._excess(part, places if quota is None else quota)) is not None:
                return found
        return None

    def _quota(self, share: _Share, places: int) -> int | None:
        """Quota of each part of a share, in places; None without a limit, as among tenants."""
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
            share.waiting_bytes += request.num_bytes
        rank = place(tenant.waiting, -request.priority, key=lambda other: -other.priority)
        tenant.waiting.insert(rank, request)

    def _line(self, tenant: _Share) -> Iterator[_Share]:
        yield from tenant.line()
        yield self._all

    def _levels(self, request: AdmissionRequest) -> list[tuple[_Share | None, str]]:
        """Shares on the path to a request, each with its part's name; None where the share does not exist."""
        parent: _Share | None = self._all
        levels = []
        for name in request.path:
            levels.append((parent, name))
            parent = parent.parts.get(name) if parent is not None else None
        return levels

    def _tenant(self, request: AdmissionRequest) -> _Share:
        """Share of a request's tenant, created if missing."""
        share = self._all
        for name in request.path:
            share = share.parts.setdefault(name, _Share(name, share))
            self._idle.pop(share, None)
        # Weights may change: the latest request's applies.
        share.weight = self._weight(request)
        return share

    def _weight(self, request: AdmissionRequest) -> int:
        return request.weight or self._weights.get(request.tenant, 1)

    def _forget(self, tenant: _Share) -> None:
        """Drop a tenant without requests, and after `STAY_S` its host and connection."""
        for share in tenant.line():
            if share.demand:
                return
            if share is not tenant and self._shared_places:
                self._idle[share] = self._now_s()
            elif share.parent is not None:
                del share.parent.parts[share.name]


def _last_pausable(share: _Share, num_running: int) -> AdmissionRequest | None:
    """Latest pausable request with fewer than `num_running` places, of the tenant with the highest load."""
    for part in sorted(share.parts.values(), key=lambda part: part.load, reverse=True):
        if (found := _last_pausable(part, num_running)) is not None:
            return found
    return next((request for request in reversed(share.pausable) if request.num_places < num_running), None)
