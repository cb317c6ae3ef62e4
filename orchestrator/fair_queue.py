"""Who waits for places, and who is next: fair among tenants, by priority and arrival within one."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, eq=False)
class Claim:
    """A request's claim on places, one for each of its outputs."""

    tenant: str
    num_places: int
    priority: int = 0
    # Its tenant's share of the places; None: as the queue was told.
    weight: int | None = None
    # Whether its first token follows from reading its prompt alone: a grammar has to be compiled first.
    only_reads: bool = True


@dataclass
class _Tenant:
    weight: int
    num_running: int = 0
    num_waiting: int = 0
    # In order: higher priority first, then arrival.
    waiting: list[Claim] = field(default_factory=list)
    # Places that it may take before its turn is over.
    credit: int = 0


class FairQueue:
    """Places in use and claims that wait for some, by tenant; all numbers count places.

    Next is the tenant that has the fewest places in use for its weight; of equals, the one whose turn it is. A turn
    lasts for `weight` places (weighted round robin). The next claim waits for all of its places, and those behind it
    wait with it: a large one must not starve.
    """

    def __init__(self, weights: Mapping[str, int] | None = None) -> None:
        self._weights = dict(weights or {})
        self._tenants: dict[str, _Tenant] = {}
        # Tenants with claims that wait, in the order of their turns.
        self._turns: dict[str, None] = {}
        self.num_running = 0
        self.num_waiting = 0

    def ahead_of(self, claim: Claim) -> int:
        """Places that the tenant's own claims ahead of this one wait for, itself not counted."""
        tenant = self._tenants.get(claim.tenant)
        waiting = tenant.waiting if tenant is not None else []
        return sum(other.num_places for other in waiting if other.priority >= claim.priority and other is not claim)

    def others_before(self, claim: Claim) -> int:
        """Places that other tenants take before this claim has its own, by turns; those in use are not looked at."""
        own_turns = (self.ahead_of(claim) + claim.num_places) / self._weight(claim)
        others = (self._tenants[name] for name in self._turns if name != claim.tenant)
        return sum(min(other.num_waiting, math.ceil(own_turns * other.weight)) for other in others)

    def wait(self, claim: Claim) -> None:
        """Let a claim wait for its turn."""
        tenant = self._tenant(claim)
        if not tenant.waiting:
            self._turns[claim.tenant] = None
            tenant.credit = tenant.weight
        bisect.insort_right(tenant.waiting, claim, key=lambda other: -other.priority)
        tenant.num_waiting += claim.num_places
        self.num_waiting += claim.num_places

    def withdraw(self, claim: Claim) -> None:
        """Let a claim wait no longer."""
        tenant = self._tenants[claim.tenant]
        tenant.waiting.remove(claim)
        tenant.num_waiting -= claim.num_places
        self.num_waiting -= claim.num_places
        if not tenant.waiting:
            del self._turns[claim.tenant]
        self._forget_idle(claim.tenant)

    def start(self, claim: Claim) -> None:
        """Give a claim its places."""
        self._tenant(claim).num_running += claim.num_places
        self.num_running += claim.num_places

    def end(self, claim: Claim) -> None:
        """Take a claim's places back."""
        self._tenants[claim.tenant].num_running -= claim.num_places
        self.num_running -= claim.num_places
        self._forget_idle(claim.tenant)

    def take_next(self, num_free: int) -> Claim | None:
        """Start the claim whose turn it is; None when nobody waits, or it needs more than `num_free` places."""
        if not self._turns:
            return None
        # `min` takes the first of equals, which is the one whose turn it is.
        name = min(self._turns, key=lambda other: self._tenants[other].num_running / self._tenants[other].weight)
        tenant = self._tenants[name]
        claim = tenant.waiting[0]
        if claim.num_places > num_free:
            return None
        tenant.credit -= claim.num_places
        self.start(claim)
        self.withdraw(claim)
        if tenant.waiting and tenant.credit <= 0:
            tenant.credit = tenant.weight
            del self._turns[name]
            self._turns[name] = None
        return claim

    def crowd(self, claim: Claim, num_places: int) -> list[Claim]:
        """The last claims of tenants that wait for more than the tenant of `claim` would: enough for `num_places`.

        Empty when there are not enough: then `claim` is itself what is too much.
        """
        own = self._tenants.get(claim.tenant)
        wanted = (claim.num_places + (own.num_waiting if own else 0)) / self._weight(claim)
        left = {name: list(self._tenants[name].waiting) for name in self._turns}
        shares = {name: self._tenants[name].num_waiting / self._tenants[name].weight for name in self._turns}
        gone: list[Claim] = []
        while sum(other.num_places for other in gone) < num_places:
            name = max(shares, key=shares.__getitem__, default=None)
            if name is None or shares[name] <= wanted:
                return []
            gone.append(left[name].pop())
            shares[name] -= gone[-1].num_places / self._tenants[name].weight
        return gone

    def _tenant(self, claim: Claim) -> _Tenant:
        tenant = self._tenants.setdefault(claim.tenant, _Tenant(1))
        # Its latest claim's, since it may have been changed.
        tenant.weight = self._weight(claim)
        return tenant

    def _weight(self, claim: Claim) -> int:
        return claim.weight or self._weights.get(claim.tenant, 1)

    def _forget_idle(self, name: str) -> None:
        tenant = self._tenants[name]
        if not tenant.num_running and not tenant.waiting:
            del self._tenants[name]
