"""Rate limits, quotas and cache salts per tenant."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable
from types import TracebackType

from coppice.core.errors import InvalidRequestError, OverloadedError
from coppice.v1 import inference_pb2
from orchestrator.api.tenants import Tenant

MINUTE_S = 60.0


class TenantLimitError(OverloadedError):
    """The tenant has reached one of its limits."""


class Bucket:
    """Token bucket with a capacity of one minute, whose level may be negative."""

    def __init__(self, per_minute: int, now_s: float) -> None:
        self._per_minute = per_minute
        self._level = float(per_minute)
        self._filled_s = now_s

    def fill(self, per_minute: int, now_s: float) -> None:
        """Refill up to now, and change the rate."""
        self._level += (now_s - self._filled_s) * self._per_minute / MINUTE_S
        self._per_minute, self._filled_s = per_minute, now_s
        self._level = min(self._level, per_minute)

    def take(self, amount: int) -> None:
        """Take `amount`, below zero if need be."""
        self._level -= amount

    def wait_s(self, amount: int) -> float:
        """Seconds until the level is `amount`; 0 if it is already."""
        return max(0.0, (amount - self._level) * MINUTE_S / self._per_minute)


class TenantAccount:
    """Places in use by a tenant, and its buckets of requests and tokens."""

    def __init__(self) -> None:
        self.num_places = 0
        self._buckets: dict[str, Bucket] = {}

    def bucket(self, name: str, per_minute: int, now_s: float) -> Bucket:
        """Bucket of "requests" (outputs that may start) or "tokens", filled up to now."""
        bucket = self._buckets.setdefault(name, Bucket(per_minute, now_s))
        bucket.fill(per_minute, now_s)
        return bucket


class TenantLease:
    """Share of a tenant's limits that one request holds while the context is entered."""

    def __init__(self, tenant_usage: TenantUsage, tenant: Tenant, num_places: int) -> None:
        self._tenant_usage = tenant_usage
        self._tenant = tenant
        self._num_places = num_places
        self._has_left = False
        # Tokens of the prompt and of all outputs, set once known.
        self.num_tokens = 0

    def __enter__(self) -> TenantLease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def leave(self) -> None:
        """Return the places and charge the tokens; further calls do nothing."""
        if not self._has_left:
            self._has_left = True
            self._tenant_usage.leave(self._tenant, self._num_places, self.num_tokens)


class TenantUsage:
    """Limits of tenants within this process: each orchestrator enforces them by itself."""

    def __init__(
        self,
        salt_secret: str = "",
        retry_after_s: Callable[[int], float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`retry_after_s` estimates the seconds until that many places are free."""
        self._salt_key = salt_secret.encode()
        self._retry_after_s = retry_after_s
        self._now_s = clock
        # Only tenants with tokens, so the token file bounds its size.
        self._accounts: dict[str, TenantAccount] = {}

    def enter(self, tenant: Tenant, num_outputs: int) -> TenantLease:
        """Count a request against its tenant's limits until the lease ends.

        Tokens are charged at the end: a request may start while the bucket is not empty, and may overdraw it; later
        requests wait until the debt is refilled.

        Raises:
            TenantLimitError: a limit is reached; has the delay until it no longer is.
            InvalidRequestError: the limits never allow this many outputs in one request.
        """
        use = TenantLease(self, tenant, num_outputs)
        if not tenant.has_token:
            return use
        account = self._accounts.setdefault(tenant.name, TenantAccount())
        for limit in (tenant.max_requests, tenant.requests_per_minute):
            if limit is not None and num_outputs > limit:
                raise InvalidRequestError("num_outputs", f"must be at most {limit}, your own limit")
        if tenant.max_requests is not None and account.num_places + num_outputs > tenant.max_requests:
            retry_after_s = self._retry_after_s(num_outputs) if self._retry_after_s is not None else 1.0
            raise TenantLimitError(f"{account.num_places} of your {tenant.max_requests} outputs run", retry_after_s)
        self._take(account, tenant, num_outputs)
        account.num_places += num_outputs
        return use

    def leave(self, tenant: Tenant, num_places: int, num_tokens: int) -> None:
        """Return a request's places and charge its tokens."""
        if not tenant.has_token:
            return
        account = self._accounts[tenant.name]
        account.num_places -= num_places
        if tenant.tokens_per_minute is not None:
            account.bucket("tokens", tenant.tokens_per_minute, self._now_s()).take(num_tokens)

    def salt(self, tenant: Tenant, salt: str) -> str:
        """Salt of a request's cached data, unique to its tenant.

        It is an HMAC because verifiers and Redis may be shared with orchestrators without tokens, whose clients choose
        the whole salt: without the secret they cannot produce this one.
        """
        if not tenant.has_token:
            return salt
        # The length prefix keeps ("ab", "c") apart from ("a", "bc").
        named = f"{len(tenant.name)} {tenant.name}{salt}"
        return hmac.new(self._salt_key, named.encode(), hashlib.sha256).hexdigest()

    def _take(self, account: TenantAccount, tenant: Tenant, num_outputs: int) -> None:
        now_s = self._now_s()
        waits_s = {}
        requests = tokens = None
        if tenant.requests_per_minute is not None:
            requests = account.bucket("requests", tenant.requests_per_minute, now_s)
            waits_s["requests"] = requests.wait_s(num_outputs)
        if tenant.tokens_per_minute is not None:
            tokens = account.bucket("tokens", tenant.tokens_per_minute, now_s)
            waits_s["tokens"] = tokens.wait_s(1)
        what = max(waits_s, key=waits_s.__getitem__, default="")
        if what and waits_s[what] > 0:
            raise TenantLimitError(f"your {what} of this minute are used up", waits_s[what])
        if requests is not None:
            requests.take(num_outputs)


def keep_limits(request: inference_pb2.GenerateRequest, tenant: Tenant) -> None:
    """Check a request against its tenant's limits; a missing `max_tokens` is set to the tenant's.

    Raises:
        InvalidRequestError: the request asks for more.
    """
    if tenant.max_tokens is not None:
        if not request.stopping.HasField("max_tokens"):
            request.stopping.max_tokens = tenant.max_tokens
        if request.stopping.max_tokens > tenant.max_tokens:
            raise InvalidRequestError("stopping.max_tokens", f"must be at most {tenant.max_tokens}, your own limit")
    if tenant.max_priority is not None and request.priority > tenant.max_priority:
        raise InvalidRequestError("priority", f"must be at most {tenant.max_priority}, your own limit")
