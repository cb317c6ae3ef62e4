"""Limits of tenants by a clock of their own, and salts that nobody shares."""

from __future__ import annotations

import random

import pytest

from coppice.core.errors import InvalidRequestError
from coppice.v1 import inference_pb2
from orchestrator.api.tenant_usage import Bucket, TenantLimitError, TenantUsage, keep_limits
from orchestrator.api.tenants import Tenant


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def tenant(name: str = "alice", **limits: int) -> Tenant:
    return Tenant(name, has_token=True, **limits)


def test_so_many_outputs_at_once_and_of_each_tenant_by_itself() -> None:
    tenant_usage = TenantUsage(retry_after_s=lambda places: 7.0 * places)
    alice, bob = tenant(max_requests=3), tenant("bob", max_requests=1)
    with tenant_usage.enter(alice, 2):
        with tenant_usage.enter(alice, 1), tenant_usage.enter(bob, 1):
            with pytest.raises(TenantLimitError, match="3 of your 3 outputs run") as caught:
                tenant_usage.enter(alice, 1)
            assert caught.value.retry_after_s == 7.0
        # One that is refused holds nothing.
        with pytest.raises(TenantLimitError):
            tenant_usage.enter(alice, 2)
        with tenant_usage.enter(alice, 1):
            pass
    with tenant_usage.enter(alice, 3):
        pass


def test_places_come_back_however_a_request_ends() -> None:
    tenant_usage, alice = TenantUsage(), tenant(max_requests=1)
    for _ in range(3):
        with pytest.raises(RuntimeError), tenant_usage.enter(alice, 1):
            raise RuntimeError("ended")


@pytest.mark.parametrize("limit", ["max_requests", "requests_per_minute"])
def test_what_the_limits_never_allow_is_the_request_s_mistake(limit: str) -> None:
    with pytest.raises(InvalidRequestError, match="at most 2") as caught:
        TenantUsage().enter(tenant(**{limit: 2}), 3)
    assert caught.value.field == "num_outputs"


def test_requests_of_a_minute_come_back_one_by_one() -> None:
    clock = Clock()
    tenant_usage, alice = TenantUsage(clock=clock), tenant(requests_per_minute=6)
    for _ in range(3):
        tenant_usage.enter(alice, 2).__exit__(None, None, None)
    with pytest.raises(TenantLimitError, match="requests of this minute") as caught:
        tenant_usage.enter(alice, 1)
    assert caught.value.retry_after_s == pytest.approx(10.0)
    clock.now_s = 9.9
    with pytest.raises(TenantLimitError) as caught:
        tenant_usage.enter(alice, 1)
    assert caught.value.retry_after_s == pytest.approx(0.1)
    clock.now_s = 10.001
    tenant_usage.enter(alice, 1)
    # A long rest is worth a minute, not more.
    clock.now_s = 10_000.0
    tenant_usage.enter(alice, 6)
    with pytest.raises(TenantLimitError):
        tenant_usage.enter(alice, 1)


def test_tokens_are_paid_when_they_are_known_and_debts_first() -> None:
    clock = Clock()
    tenant_usage, alice = TenantUsage(clock=clock), tenant(tokens_per_minute=600)
    with tenant_usage.enter(alice, 1) as use:
        # Not known yet, so that a second one may begin.
        with tenant_usage.enter(alice, 1) as other:
            other.num_tokens = 100
        use.num_tokens = 1100
    with pytest.raises(TenantLimitError, match="tokens of this minute") as caught:
        tenant_usage.enter(alice, 1)
    # 600 in debt, and one more is needed to begin.
    assert caught.value.retry_after_s == pytest.approx(60.1)
    clock.now_s = 60.2
    tenant_usage.enter(alice, 1)


def test_over_a_long_time_no_more_is_used_than_the_rate_allows() -> None:
    clock, dice = Clock(), random.Random(5)
    tenant_usage, alice = TenantUsage(clock=clock), tenant(tokens_per_minute=1000, requests_per_minute=30)
    num_tokens = num_requests = 0
    while clock.now_s < 3600:
        try:
            with tenant_usage.enter(alice, 1) as use:
                use.num_tokens = dice.randrange(200)
        except TenantLimitError as error:
            # Never told to wait in vain.
            clock.now_s += error.retry_after_s + 1e-6
            tenant_usage.enter(alice, 1).__exit__(None, None, None)
            num_requests += 1
        else:
            num_tokens += use.num_tokens
            num_requests += 1
    minutes = clock.now_s / 60 + 1
    assert num_requests <= 30 * minutes
    assert 0.9 * 1000 * (minutes - 1) < num_tokens <= 1000 * minutes + 200


def test_a_changed_rate_holds_at_once() -> None:
    bucket = Bucket(60, 0.0)
    bucket.fill(6, 0.0)
    assert bucket.wait_s(6) == 0
    assert bucket.wait_s(7) == pytest.approx(10.0)
    bucket.take(6)
    bucket.fill(60, 10.0)
    # Until then at the old rate.
    assert bucket.wait_s(2) == pytest.approx(1.0)


def test_who_has_no_token_has_no_limits() -> None:
    tenant_usage = TenantUsage()
    for _ in range(1000):
        tenant_usage.enter(Tenant("anyone"), 1)
    assert tenant_usage.salt(Tenant("anyone"), "own") == "own"


def test_no_two_tenants_have_one_salt() -> None:
    tenant_usage = TenantUsage("secret")
    names = ["a", "b", "ab", "1 a", "a1", "", "3 abc"]
    salts = {tenant_usage.salt(tenant(name), salt) for name in names for salt in names}
    assert len(salts) == len(names) ** 2
    assert tenant_usage.salt(tenant("a"), "b") == TenantUsage("secret").salt(tenant("a"), "b")
    assert tenant_usage.salt(tenant("a"), "b") != TenantUsage("another").salt(tenant("a"), "b")
    # No longer than a salt may be, whatever it is made of.
    assert len(tenant_usage.salt(tenant("a" * 128), "b" * 128)) <= 128


def test_a_request_gets_its_tenants_limits_or_keeps_its_own_below_them() -> None:
    alice = tenant(max_tokens=10, max_priority=0)
    request = inference_pb2.GenerateRequest()
    keep_limits(request, alice)
    assert request.stopping.max_tokens == 10
    request.stopping.max_tokens = 3
    keep_limits(request, alice)
    assert request.stopping.max_tokens == 3
    request.stopping.max_tokens = 11
    with pytest.raises(InvalidRequestError, match="at most 10") as caught:
        keep_limits(request, alice)
    assert caught.value.field == "stopping.max_tokens"
    request = inference_pb2.GenerateRequest(priority=1)
    with pytest.raises(InvalidRequestError, match="at most 0") as caught:
        keep_limits(request, alice)
    assert caught.value.field == "priority"
    request = inference_pb2.GenerateRequest(priority=1)
    keep_limits(request, tenant())
    assert not request.stopping.HasField("max_tokens")
