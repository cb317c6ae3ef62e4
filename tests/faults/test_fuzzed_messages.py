"""A short form of the message fuzzing that `make faults` does at length."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coppice.client import Options, RequestFailedError
from coppice.core.errors import InvalidRequestError
from coppice.v1 import drafter_pb2, inference_pb2, tree_pb2, verifier_pb2
from coppice.wire.convert import sampling_from_proto, stopping_from_proto, tree_from_proto
from tests.conftest import StartFakes
from tests.fakes import FakeDrafter, FakeVerifier
from tests.faults import fuzz as fuzzing
from tests.faults.doors import peers_door, public_door
from tests.faults.fuzz import Context, FuzzError, fuzz
from tests.faults.hostile_peers import HostileDrafter
from tests.faults.messages import PROMPT, hostile, mangled_bytes, random_message, valid_message
from tests.toy_target import babble, plain

KINDS = [
    inference_pb2.GenerateRequest,
    inference_pb2.TokenizeRequest,
    verifier_pb2.VerifyRequest,
    verifier_pb2.VerifyResponse,
    drafter_pb2.DraftRequest,
    drafter_pb2.DraftResponse,
]


async def test_no_message_makes_an_orchestrator_crash_hang_or_blame_itself() -> None:
    async with public_door() as door:
        counts = await fuzz(door, num_messages=100, seed=1)
    assert counts["messages"] >= 100
    # All sorts of answers were given, so that it was not one check that refused everything.
    assert min(counts["INVALID_ARGUMENT"], counts["OK"], counts["checks"]) > 0


async def test_a_hostile_verifier_costs_its_own_requests_and_no_later_one() -> None:
    async with peers_door() as door:
        counts = await fuzz(door, num_messages=300, seed=1)
    assert counts["messages"] >= 300
    # Some of its answers were refused; those of the checks were not.
    assert min(counts["INTERNAL"], counts["checks"]) > 0


@given(st.randoms(use_true_random=True))
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_a_tree_from_the_wire_is_valid_or_refused(chance: random.Random) -> None:
    message = random_message(tree_pb2.TokenTree, chance)
    draft = hostile(verifier_pb2.VerifyRequest, chance)
    for tree in (message, draft.draft.tree if draft is not None else message):
        try:
            read = tree_from_proto(tree)
        except InvalidRequestError:
            continue
        # By the definition, node by node: a parent is an earlier node, siblings differ, and numbers are numbers.
        pairs = list(zip(read.parents, read.token_ids, strict=True))
        assert all(-1 <= parent < node for node, (parent, _) in enumerate(pairs))
        assert len(set(pairs)) == len(pairs)
        assert all(value <= 0 and value > -float("inf") for value in read.log_probs)


@given(st.randoms(use_true_random=True))
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_parameters_from_the_wire_are_in_range_or_refused(chance: random.Random) -> None:
    message = hostile(inference_pb2.GenerateRequest, chance) or inference_pb2.GenerateRequest()
    try:
        sampling, stopping = sampling_from_proto(message.sampling), stopping_from_proto(message.stopping)
    except InvalidRequestError:
        return
    assert 0 <= sampling.temperature <= 100
    assert 0 < sampling.top_p <= 1
    assert stopping.max_tokens is None or stopping.min_tokens <= stopping.max_tokens


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.DESCRIPTOR.name)
def test_a_seed_gives_the_same_messages_again_and_they_differ_from_each_other(kind: type) -> None:
    drawn = [[hostile(kind, chance) for _ in range(40)] for chance in (random.Random(5), random.Random(5))]
    data = [[one and one.SerializeToString(deterministic=True) for one in messages] for messages in drawn]
    assert data[0] == data[1]
    assert len(set(data[0])) > 15
    valid = valid_message(kind, random.Random(1)).SerializeToString()
    assert mangled_bytes(valid, random.Random(1)) != valid


async def test_a_hostile_drafter_changes_no_token(start_fakes: StartFakes) -> None:
    drafter = HostileDrafter()
    # It is dropped from a sequence at its first mistake, so that each request gives it another chance.
    async with start_fakes(FakeVerifier(reroots=True), drafter) as (client, orchestrator):
        for seed in range(25):
            answer = await client.generate(PROMPT, Options(max_tokens=20, seed=seed, temperature=1.0))
            assert list(answer.token_ids) == plain(babble, PROMPT, 20, seed)
        assert orchestrator.service.num_requests == 0
    assert drafter.num_trees > 100


class LyingVerifier(FakeVerifier):
    """Changes its first messages of a kind."""

    lie: Callable[[verifier_pb2.VerifyResponse], None]

    async def Verify(self, requests: Any, context: Any) -> AsyncIterator[verifier_pb2.VerifyResponse]:  # noqa: N802
        async for response in super().Verify(requests, context):
            self.lie(response)
            yield response


def of_no_vocabulary(response: verifier_pb2.VerifyResponse) -> None:
    if response.HasField("outcome"):
        response.outcome.token_ids[-1] = 2**32 - 1


def endless(response: verifier_pb2.VerifyResponse) -> None:
    if response.HasField("outcome"):
        response.outcome.token_ids.extend([98] * 1_000_000)


def too_deep(response: verifier_pb2.VerifyResponse) -> None:
    if response.HasField("outcome"):
        response.outcome.draft_depth = 10_000


def of_a_bad_draft(response: verifier_pb2.VerifyResponse) -> None:
    if response.HasField("outcome"):
        response.outcome.redraft.token_ids.extend([98, 99])
        response.outcome.redraft.parents.extend([1, 0])


def of_no_reason(response: verifier_pb2.VerifyResponse) -> None:
    if response.HasField("finished"):
        response.finished.reason = 99  # type: ignore[assignment]


def of_no_code(response: verifier_pb2.VerifyResponse) -> None:
    if response.HasField("finished"):
        response.error.code, response.error.message = 1234, "it is broken"


@pytest.mark.parametrize("lie", [of_no_vocabulary, endless, too_deep, of_a_bad_draft, of_no_reason, of_no_code])
async def test_a_lie_of_a_verifier_fails_its_request_and_the_log_says_whose_it_is(
    lie: Callable[[verifier_pb2.VerifyResponse], None], start_fakes: StartFakes, caplog: pytest.LogCaptureFixture
) -> None:
    verifier = LyingVerifier()
    verifier.lie = lie
    async with start_fakes(verifier, FakeDrafter()) as (client, orchestrator):
        with pytest.raises(RequestFailedError) as failed:
            await client.generate(PROMPT, Options(max_tokens=8, seed=1), timeout_s=60.0)
        assert failed.value.code.name == "INTERNAL"
        assert orchestrator.service.num_requests == orchestrator.verifiers.num_sequences == 0
        [error] = [record.exc_info[1] for record in caplog.records if record.exc_info]
        assert "the verifier" in str(error)


class BadDoor:
    """A service with one fault of its own."""

    name = "bad one"
    at_once = 2

    def __init__(self, fault: str) -> None:
        self._fault = fault
        self._num_checks = 0
        self.mib = 0.0

    async def converse(self, chance: random.Random, counts: Counter[str]) -> None:
        counts["messages"] += 1
        self.mib += self._fault == "grew by"
        if self._fault == "hangs":
            await asyncio.Event().wait()
        fuzzing._check_call(Context(code="INTERNAL" if self._fault == "INTERNAL" else "OK"), [])

    async def check(self) -> Sequence[int]:
        self._num_checks += 1
        return [1, 2] if self._fault != "says" or self._num_checks == 1 else [1, 3]

    def left(self) -> str:
        return "a sequence" if self._fault == "still has" else ""


@pytest.mark.parametrize("fault", ["hangs", "INTERNAL", "says", "still has", "grew by"])
async def test_the_fuzzer_finds_a_service_out(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # What hangs is waited for in vain; what is left over may be gone before, and a busy machine is no fault.
    monkeypatch.setattr(fuzzing, "DEADLINE_S", 0.1 if fault == "hangs" else 2.0)
    monkeypatch.setattr(fuzzing, "MIN_MESSAGES_FOR_GROWTH", 100)
    door = BadDoor(fault)
    # The suite's process has memory of other tests, whose coming and going would hide the door's.
    monkeypatch.setattr(fuzzing, "resident_mib", lambda: door.mib)
    with pytest.raises(FuzzError, match=fault):
        await fuzz(door, num_messages=150 if fault == "grew by" else 10, seed=0)
