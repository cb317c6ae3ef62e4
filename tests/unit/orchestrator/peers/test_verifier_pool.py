"""What a pool makes of verifiers that come at an odd moment."""

from __future__ import annotations

from dataclasses import replace

import grpc
import pytest

from coppice.core.errors import CoppiceError, IncompatibleError, OverloadedError, UnavailableError
from coppice.core.sampling import SamplingParams, StoppingOptions
from coppice.v1 import sampling_pb2, verifier_pb2
from orchestrator.peers.verifier_client import SequenceHandle, VerifierClient, VerifierInfo
from orchestrator.peers.verifier_pool import VerifierPool
from orchestrator.request.rounds import VerifyOpening
from tests.toy_deployment import INFO

ODD = replace(INFO, model="another")
OPENING = VerifyOpening(
    (1, 2, 3),
    0,
    SamplingParams(),
    StoppingOptions(),
    sampling_pb2.ACCEPTANCE_RULE_SAMPLE_AND_FOLLOW,
    sampling_pb2.EXACTNESS_STRICT,
    linger_us=0,
    priority=0,
    feature_size=0,
    cache_salt="",
    top_log_probs=None,
)


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
        pool.join(Sequence())  # type: ignore[arg-type]


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


class Sequence:
    """A sequence of three tokens, and where it was sent."""

    request_id = "one"

    def __init__(self, *, is_complete: bool = False) -> None:
        self.is_complete = is_complete
        self.sent_to: list[str] = []
        self.num_refused = 0
        self.error: CoppiceError | None = None

    def opening(self) -> VerifyOpening | None:
        return None if self.finish_if_complete() else OPENING

    def finish_if_complete(self) -> bool:
        return self.is_complete

    def refused(self) -> int:
        self.num_refused += 1
        return self.num_refused

    def on_opened(self, place: SequenceHandle) -> None:
        self.sent_to.append(place.verifier.address)

    def on_failed(self, error: CoppiceError) -> None:
        self.error = error


def full_pool(number: int) -> VerifierPool:
    """All of its verifiers are there, and none has room for what it has not got yet."""
    pool = VerifierPool([f"127.0.0.1:{index}" for index in range(1, number + 1)], resume_s=1.0)
    for index, client in enumerate(pool.clients):
        known(pool, index, INFO)
        client.stream.send = lambda *_: None  # type: ignore[method-assign]
        pool.on_up(client)
    pool._settle_on(pool.clients[0])
    return pool


def refuse(pool: VerifierPool, sequence: Sequence) -> None:
    """Have the verifier that it was sent to last say that it has no room."""
    [client] = [client for client in pool.clients if client.address == sequence.sent_to[-1]]
    [number] = client._handlers
    error = verifier_pb2.SequenceError(code=grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], message="full")
    client.on_message(verifier_pb2.VerifyResponse(sequence_id=number, error=error))


async def test_every_verifier_is_asked_before_a_sequence_is_refused_for_want_of_room() -> None:
    """However many of them there are: a refusal is no loss."""
    pool, sequence = full_pool(6), Sequence()
    pool.join(sequence)  # type: ignore[arg-type]
    for number in range(6):
        assert len(set(sequence.sent_to)) == len(sequence.sent_to) == number + 1
        assert sequence.error is None
        refuse(pool, sequence)
    assert isinstance(sequence.error, OverloadedError)
    await pool.close()


async def test_one_that_is_about_to_stop_and_has_room_is_asked_before_one_that_has_none() -> None:
    pool, sequence = full_pool(2), Sequence()
    pool.clients[1].is_draining = True
    pool.join(sequence)  # type: ignore[arg-type]
    refuse(pool, sequence)
    assert sequence.sent_to == ["127.0.0.1:1", "127.0.0.1:2"]
    refuse(pool, sequence)
    assert isinstance(sequence.error, OverloadedError)
    await pool.close()


async def test_what_needs_no_more_passes_needs_no_verifier() -> None:
    pool, away = VerifierPool(["127.0.0.1:1"], resume_s=1.0), Sequence()
    pool.join(Sequence(is_complete=True))  # type: ignore[arg-type]
    assert pool.num_sequences == 0
    pool.join(away)  # type: ignore[arg-type]
    assert pool.num_sequences == 1
    await pool.close()
    assert isinstance(away.error, UnavailableError)
    pool.join(Sequence(is_complete=True))  # type: ignore[arg-type]
