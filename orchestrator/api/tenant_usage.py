"""Usage of each tenant, held against its limits, and its salts."""

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
    """The tenant uses as much as it may already."""


class Bucket:
    """Fills steadily up to a minute's worth, and may be in debt."""

    def __init__(self, per_minute: int, now_s: float) -> None:
        self._per_minute = per_minute
        self._level = float(per_minute)
        self._filled_s = now_s

    def fill(self, per_minute: int, now_s: float) -> None:
        """Fill it up to now, and from now on at another rate if that has changed."""
        self._level += (now_s - self._filled_s) * self._per_minute / MINUTE_S
        self._per_minute, self._filled_s = per_minute, now_s
        self._level = min(self._level, per_minute)

    def take(self, amount: int) -> None:
        """Take out, into debt if need be."""
        self._level -= amount

    def wait_s(self, amount: int) -> float:
        """How long until it has that much; 0 when it has."""
        return max(0.0, (amount - self._level) * MINUTE_S / self._per_minute)


class TenantAccount:
    """One tenant's use: places now, and what has been taken of late."""

    def __init__(self) -> None:
        self.num_places = 0
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None

    def requests(self, per_minute: int, now_s: float) -> Bucket:
        """Outputs that may begin, filled up to now."""
        self._requests = self._requests or Bucket(per_minute, now_s)
        self._requests.fill(per_minute, now_s)
        return self._requests

    def tokens(self, per_minute: int, now_s: float) -> Bucket:
        """Tokens that may be used, filled up to now."""
        self._tokens = self._tokens or Bucket(per_minute, now_s)
        self._tokens.fill(per_minute, now_s)
        return self._tokens


class TenantLease:
    """What one request uses of its tenant's limits while it is entered."""

    def __init__(self, tenant_usage: TenantUsage, tenant: Tenant, num_places: int) -> None:
        self._tenant_usage = tenant_usage
        self._tenant = tenant
        self._num_places = num_places
        self._has_left = False
        # Of the prompt and of all outputs, once they are known.
        self.num_tokens = 0

    def __enter__(self) -> TenantLease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def leave(self) -> None:
        """Count the request out; further calls do nothing."""
        if not self._has_left:
            self._has_left = True
            self._tenant_usage.leave(self._tenant, self._num_places, self.num_tokens)


class TenantUsage:
    """Limits of tenants, in this process alone: several orchestrators allow as many times as much."""

    def __init__(
        self,
        salt_secret: str = "",
        retry_after_s: Callable[[int], float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`retry_after_s` guesses when so many places are free again."""
        self._salt_key = salt_secret.encode()
        self._retry_after_s = retry_after_s
        self._now_s = clock
        # Of tenants with a token, of which the file has so many.
        self._accounts: dict[str, TenantAccount] = {}

    def enter(self, tenant: Tenant, num_outputs: int) -> TenantLease:
        """Count a request in; leaving what is returned counts it out.

        Tokens are known when they are used: a request may begin while some are left, and what it then uses may be more.
        Later ones wait until that is made up for.

        Raises:
            TenantLimitError: a limit is reached; says when it is not any more.
            InvalidRequestError: the limits never allow so many outputs in one request.
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
        """Count a request out, and the tokens that it has used."""
        if not tenant.has_token:
            return
        account = self._accounts[tenant.name]
        account.num_places -= num_places
        if tenant.tokens_per_minute is not None:
            account.tokens(tenant.tokens_per_minute, self._now_s()).take(num_tokens)

    def salt(self, tenant: Tenant, salt: str) -> str:
        """The salt of what is computed and remembered for a request: no two tenants have the same one.

        A message authentication code, since verifiers and Redis may be shared with orchestrators that ask for no
        tokens: there a client chooses the whole salt, and without the secret it cannot choose this one.
        """
        if not tenant.has_token:
            return salt
        # The name's length keeps ("ab", "c") apart from ("a", "bc").
        named = f"{len(tenant.name)} {tenant.name}{salt}"
        return hmac.new(self._salt_key, named.encode(), hashlib.sha256).hexdigest()

    def _take(self, account: TenantAccount, tenant: Tenant, num_outputs: int) -> None:
        now_s = self._now_s()
        waits_s = {}
        requests = tokens = None
        if tenant.requests_per_minute is not None:
            requests = account.requests(tenant.requests_per_minute, now_s)
            waits_s["requests"] = requests.wait_s(num_outputs)
        if tenant.tokens_per_minute is not None:
            tokens = account.tokens(tenant.tokens_per_minute, now_s)
            waits_s["tokens"] = tokens.wait_s(1)
        what = max(waits_s, key=waits_s.__getitem__, default="")
        if what and waits_s[what] > 0:
            raise TenantLimitError(f"your {what} of this minute are used up", waits_s[what])
        if requests is not None:
            requests.take(num_outputs)


def keep_limits(request: inference_pb2.GenerateRequest, tenant: Tenant) -> None:
    """Hold a request to its tenant's limits; where it names no `max_tokens`, the tenant's is set.

    Raises:
        InvalidRequestError: it asks for more.
    """
    if tenant.max_tokens is not None:
        if not request.stopping.HasField("max_tokens"):
            request.stopping.max_tokens = tenant.max_tokens
        if request.stopping.max_tokens > tenant.max_tokens:
            raise InvalidRequestError("stopping.max_tokens", f"must be at most {tenant.max_tokens}, your own limit")
    if tenant.max_priority is not None and request.priority > tenant.max_priority:
        raise InvalidRequestError("priority", f"must be at most {tenant.max_priority}, your own limit")
