"""Tenants of the public API: limits and token digests."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.api.validation import MAX_TENANT_CHARACTERS

_DIGEST = re.compile(r"[0-9a-f]{64}")
# Largest value of each limit: the range of its proto field. All but `max_priority` are at least 1.
_LIMITS = {
    "weight": 2**31 - 1,
    "max_requests": 2**31 - 1,
    "requests_per_minute": 2**31 - 1,
    "tokens_per_minute": 2**63 - 1,
    "max_tokens": 2**32 - 1,
    "max_priority": 2**31 - 1,
}
_LOWEST = {"max_priority": -(2**31)}


@dataclass(frozen=True)
class Tenant:
    """Tenant and its limits; a limit of None means only the service's own limits apply."""

    name: str
    # Weight of the tenant in fair sharing.
    weight: int | None = None
    # Outputs that run or wait at once, and outputs started per minute.
    max_requests: int | None = None
    requests_per_minute: int | None = None
    # Tokens of prompts and outputs.
    tokens_per_minute: int | None = None
    # Tokens of one output.
    max_tokens: int | None = None
    max_priority: int | None = None
    # Whether it sees the rounds of all tenants' requests.
    admin: bool = False
    # Whether a token proves the tenant.
    has_token: bool = False


def parse_tokens(text: str) -> dict[str, Tenant]:
    """Tenants by SHA-256 digest of their tokens: JSON lines, one per tenant, `{"tenant": ..., "sha256": [...]}`.

    Limits are further fields, named as in `Tenant`. Empty lines and lines that begin with # are skipped.

    Raises:
        ValueError: a line is wrong; the message has its number and nothing that it says.
    """
    found: dict[str, Tenant] = {}
    names: set[str] = set()
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            fields = json.loads(line)
            tenant, digests = _tenant(fields), _digests(fields)
        except (ValueError, RecursionError) as error:
            reason = "is not JSON" if isinstance(error, json.JSONDecodeError | RecursionError) else str(error)
            raise ValueError(f"line {number}: {reason}") from None
        if tenant.name in names:
            raise ValueError(f"line {number}: its tenant has an earlier line; one line has all tokens of a tenant")
        if found.keys() & digests:
            raise ValueError(f"line {number}: a token is another tenant's, too")
        names.add(tenant.name)
        found.update(dict.fromkeys(digests, tenant))
    return found


def _tenant(fields: Any) -> Tenant:
    if not isinstance(fields, dict):
        raise ValueError("is no object")
    name = fields.get("tenant")
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_TENANT_CHARACTERS:
        raise ValueError(f"tenant must be a text of 1 to {MAX_TENANT_CHARACTERS} characters")
    if fields.keys() - _LIMITS.keys() - {"tenant", "sha256", "admin"}:
        raise ValueError(f"has a field other than tenant, sha256, admin, {', '.join(_LIMITS)}")
    admin = fields.get("admin", False)
    if not isinstance(admin, bool):
        raise ValueError("admin must be true or false")
    return Tenant(name, admin=admin, has_token=True, **{limit: _limit(fields, limit) for limit in _LIMITS})


def _limit(fields: Mapping[str, Any], name: str) -> int | None:
    value = fields.get(name)
    lowest, highest = _LOWEST.get(name, 1), _LIMITS[name]
    # `bool` is a subclass of `int`.
    if value is not None and (type(value) is not int or not lowest <= value <= highest):
        raise ValueError(f"{name} must be a whole number in [{lowest}, {highest}]")
    return value


def _digests(fields: Mapping[str, Any]) -> list[str]:
    digests = fields.get("sha256")
    if not isinstance(digests, list) or not digests:
        raise ValueError("sha256 must be a list of digests, one for each token of the tenant")
    if any(not isinstance(digest, str) or not _DIGEST.fullmatch(digest) for digest in digests):
        raise ValueError("sha256 must have digests of 64 hexadecimal digits in lower case")
    if len(set(digests)) < len(digests):
        raise ValueError("sha256 has a digest twice")
    return digests
