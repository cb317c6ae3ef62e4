"""What verifiers and drafters say of themselves when an orchestrator connects: lies are refused, or change no token."""

from __future__ import annotations

import json
import random
from typing import Any

import grpc
import pytest

from coppice.client import Client, Options
from coppice.core.errors import CoppiceError, IncompatibleError, UnavailableError
from coppice.core.tokenizer import fingerprint
from coppice.v1 import drafter_pb2, verifier_pb2
from coppice.wire.unreadable import UnreadablePeerError
from orchestrator.peers.drafter_client import DrafterClient
from orchestrator.peers.verifier_client import VerifierClient
from tests.conftest import StartFakes
from tests.fakes import FakeDrafter, FakeVerifier
from tests.faults.messages import PROMPT, mangled_bytes, mutated, random_message
from tests.toy_target import FINGERPRINT, TOKENIZER_JSON, babble, plain, toy_tokenizer_json

NUM_HANDSHAKES, CHECK_EVERY = 200, 20
# With what a handshake may end.
REFUSED = (CoppiceError, grpc.aio.AioRpcError, UnreadablePeerError)
BROKEN = json.dumps({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}}).encode()


class HostileDescriptions(FakeVerifier):
    """Changes the bytes of its tokenizer, now and then."""

    chance: random.Random | None = None

    async def GetTokenizer(self, request: Any, context: Any) -> Any:  # noqa: N802
        answer = await super().GetTokenizer(request, context)
        if self.chance is not None and self.chance.random() < 0.7:
            answer.tokenizer_json = mangled_bytes(answer.tokenizer_json, self.chance)
        return answer


class HostileDescribed(FakeDrafter):
    """Drafts well, and describes itself in any way."""

    chance: random.Random | None = None
    # Descriptions with another tokenizer.
    num_foreign = 0

    async def Describe(self, request: Any, context: Any) -> drafter_pb2.DrafterServiceDescribeResponse:  # noqa: N802
        answer = await super().Describe(request, context)
        if self.chance is None:
            return answer
        is_random = self.chance.random() < 0.1
        answer = random_message(type(answer), self.chance) if is_random else mutated(answer, self.chance)
        self.num_foreign += answer.tokenizer_fingerprint != FINGERPRINT
        return answer


async def is_right(client: Client, seed: int) -> bool:
    """Whether a request gets the tokens of plain decoding."""
    answer = await client.generate(PROMPT, Options(max_tokens=12, seed=seed, temperature=1.0))
    return list(answer.token_ids) == plain(babble, PROMPT, 12, seed)


async def num_refused(peer: VerifierClient | DrafterClient, client: Client) -> int:
    """How many of many handshakes were refused; requests in between are right."""
    refused = 0
    for number in range(NUM_HANDSHAKES):
        if isinstance(peer, VerifierClient):
            # It asks for what it does not have.
            peer.tokenizer = verifier_pb2.GetTokenizerResponse()
        try:
            await peer.handshake()
        except REFUSED:
            refused += 1
        if number % CHECK_EVERY == 0:
            assert await is_right(client, number)
    return refused


async def test_no_description_of_a_drafter_changes_a_token(start_fakes: StartFakes) -> None:
    hostile = HostileDescribed()
    async with start_fakes(FakeVerifier(), hostile, FakeDrafter()) as (client, orchestrator):
        hostile.chance = random.Random(1)
        refused = await num_refused(orchestrator.drafters.clients[0], client)
        hostile.chance = None
        await orchestrator.drafters.clients[0].handshake()
        assert await is_right(client, 1)
    assert 0 < hostile.num_foreign <= refused < NUM_HANDSHAKES - 20


async def test_a_changed_tokenizer_of_a_verifier_is_refused(start_fakes: StartFakes) -> None:
    hostile = HostileDescriptions()
    async with start_fakes(hostile) as (client, orchestrator):
        hostile.chance = random.Random(1)
        verifier = orchestrator.verifiers.clients[0]
        refused = await num_refused(verifier, client)
        assert verifier.tokenizer.tokenizer_json in (b"", TOKENIZER_JSON)
    assert 20 < refused < NUM_HANDSHAKES - 20


TOKENIZERS = {
    "no JSON": b"\xff\xfe garbage",
    "no object": b"[]",
    "nothing": b"",
    "too deep": b"[" * 100_000,
    "another vocabulary": toy_tokenizer_json("<end>"),
}


@pytest.mark.parametrize("tokenizer_json", TOKENIZERS.values(), ids=TOKENIZERS)
async def test_a_tokenizer_that_a_verifier_has_not_described_is_refused_and_another_verifier_serves(
    tokenizer_json: bytes, start_fakes: StartFakes, caplog: pytest.LogCaptureFixture
) -> None:
    odd = FakeVerifier(tokenizer_json=tokenizer_json)
    with pytest.raises(UnavailableError, match=r"sends another tokenizer than it describes"):
        async with start_fakes(odd, connect_timeout_s=0.3):
            pass
    async with start_fakes([odd, FakeVerifier()]) as (client, orchestrator):
        assert await is_right(client, 1)
        assert orchestrator.verifiers.num_usable == 1
    assert not odd.opened
    assert not any(record.exc_info for record in caplog.records)


async def test_a_tokenizer_that_cannot_be_used_ends_an_orchestrator_with_a_line(start_fakes: StartFakes) -> None:
    verifier = FakeVerifier(tokenizer_json=BROKEN, tokenizer_fingerprint=fingerprint(BROKEN))
    with pytest.raises(IncompatibleError, match="the verifiers' tokenizer cannot be used: "):
        async with start_fakes(verifier):
            pass
