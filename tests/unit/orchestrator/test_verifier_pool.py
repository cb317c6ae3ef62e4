"""What a pool makes of verifiers that come at an odd moment."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coppice.errors import IncompatibleError, UnavailableError
from coppice.v1 import sampling_pb2
from orchestrator.verifier_client import VerifierClient, VerifierInfo
from orchestrator.verifier_pool import VerifierPool
from tests.toy_deployment import INFO

ODD = replace(INFO, model="another")


def known(pool: VerifierPool, index: int, info: VerifierInfo) -> VerifierClient:
    """A verifier whose handshake is over."""
    client = pool.clients[index]
    pool.check(client, info)
    client._info = info
    return client


async def test_one_whose_handshake_came_before_it_was_settled_what_is_served_is_not_used() -> None:
    pool = VerifierPool(["127.0.0.1:1", "127.0.0.1:2"], resume_s=1.0)
    first, odd = known(pool, 0, INFO), known(pool, 1, ODD)
    pool.on_up(first)
    pool._settle_on(first)
    pool.on_up(odd)
    assert pool.num_usable == 1
    with pytest.raises(IncompatibleError, match="model another instead of toy"):
        pool.check(odd, ODD)
    await pool.close()
    with pytest.raises(UnavailableError, match="no verifier is connected"):
        pool.join(None)  # type: ignore[arg-type]


async def test_a_verifier_may_offer_more_rules_than_the_others_and_not_fewer() -> None:
    rules = (sampling_pb2.ACCEPTANCE_RULE_SAMPLE_AND_FOLLOW, sampling_pb2.ACCEPTANCE_RULE_TRAVERSAL)
    pool = VerifierPool(["127.0.0.1:1", "127.0.0.1:2"], resume_s=1.0)
    fewer, more = replace(INFO, acceptance_rules=rules[:1]), replace(INFO, acceptance_rules=rules)
    pool._settle_on(known(pool, 0, fewer))
    known(pool, 1, more)
    pool._settle_on(pool.clients[1])
    with pytest.raises(IncompatibleError, match="without acceptance_rules"):
        pool.check(pool.clients[0], fewer)
    await pool.close()
