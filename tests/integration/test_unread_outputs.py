"""Clients that do not take what waits for them: their places are others', and in the end their calls end."""

from __future__ import annotations

import asyncio

import pytest

from coppice.client import Client, Options
from coppice.v1 import inference_pb2, sampling_pb2
from orchestrator.app import Orchestrator
from orchestrator.request.delivery import Undelivered, output_bytes
from tests.conftest import StartFakes
from tests.fakes import FakeDrafter, FakeVerifier, eventually
from tests.slow_reader import WINDOW_BYTES, slow_reader
from tests.toy_target import babble, plain

PATH = b"/coppice.v1.InferenceService/Generate"
PROMPT = [ord(character) for character in "def "]


def message(max_tokens: int) -> bytes:
    """Asks for tokens with all log-probabilities that there may be: more bytes than the window has."""
    return inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=PROMPT),
        sampling=sampling_pb2.SamplingParams(seed=1, temperature=1.0),
        stopping=sampling_pb2.StoppingOptions(max_tokens=max_tokens, ignore_eos=True),
        response=inference_pb2.ResponseOptions(top_log_probs=20),
    ).SerializeToString()


def num_calls(orchestrator: Orchestrator) -> int:
    """Calls that have begun and not ended, delivered or not."""
    return len(orchestrator.service.tally.generations())


async def test_an_output_that_has_ended_gives_its_place_back_before_it_is_read(start_fakes: StartFakes) -> None:
    verifier = FakeVerifier()
    async with start_fakes(verifier, FakeDrafter(), max_requests=2) as (client, orchestrator):
        async with slow_reader(orchestrator.address) as slow:
            for number in (1, 2):
                slow.call(number, PATH, message(60))
            admission = orchestrator.service.admission
            await eventually(lambda: num_calls(orchestrator) == 2 and admission.num_running == 0)
            assert not verifier.active
            completion = await client.generate(PROMPT, Options(max_tokens=20, seed=7), timeout_s=5.0)
            assert list(completion.token_ids) == plain(babble, PROMPT, 20, 7)
            assert num_calls(orchestrator) == 2
            assert set(slow.num_bytes.values()) == {WINDOW_BYTES}
            # Nothing is lost for being late.
            for number in (1, 2):
                slow.take(number, 1 << 20)
            await eventually(lambda: num_calls(orchestrator) == 0)
            assert min(slow.num_bytes.values()) > 60 * 20 * 5
        assert orchestrator.service.tally.finished["length"] == 3


async def test_a_call_whose_client_takes_nothing_is_ended_and_others_are_not(start_fakes: StartFakes) -> None:
    verifier = FakeVerifier(pass_s=0.02)
    async with start_fakes(verifier, FakeDrafter(), unread_s=0.4) as (client, orchestrator):
        tally = orchestrator.service.tally
        async with slow_reader(orchestrator.address) as slow:
            for number in (1, 2):
                slow.call(number, PATH, message(300))
            # The second takes something all along.
            while not tally.finished["unread"]:
                slow.take(2, 4 * WINDOW_BYTES)
                await asyncio.sleep(0.05)
            await eventually(lambda: num_calls(orchestrator) == len(verifier.active) == 1)
            # It is told when it looks again.
            slow.take(1, 1 << 20)
            await eventually(lambda: 1 in slow.ends)
            assert b"a message was not taken for 0.4 s" in slow.ends[1]
            slow.take(2, 1 << 20)
            await eventually(lambda: 2 in slow.ends)
            assert b"not taken" not in slow.ends[2]
        assert tally.finished["length"] == 1
        completion = await client.generate(PROMPT, Options(max_tokens=5, seed=7))
        assert list(completion.token_ids) == plain(babble, PROMPT, 5, 7)


async def test_one_that_has_ended_already_is_dropped_when_it_is_not_taken(start_fakes: StartFakes) -> None:
    async with start_fakes(FakeVerifier(), unread_s=0.3) as (_, orchestrator):
        async with slow_reader(orchestrator.address) as slow:
            slow.call(1, PATH, message(60))
            await eventually(lambda: num_calls(orchestrator) == 1)
            await eventually(lambda: num_calls(orchestrator) == 0, timeout_s=5.0)
            assert not slow.ends
        assert orchestrator.service.tally.finished["length"] == 1


@pytest.mark.parametrize("ends", [True, False])
async def test_only_so_much_waits_for_a_connection_without_a_place(
    start_fakes: StartFakes, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond that outputs keep their places, and others of the connection wait for these."""
    monkeypatch.setattr(Undelivered.__init__, "__defaults__", (output_bytes(60, 20),))
    async with start_fakes(FakeVerifier(), max_requests=2, unread_s=0.5 if ends else 0.0) as (_, orchestrator):
        admission = orchestrator.service.admission
        async with slow_reader(orchestrator.address) as slow:
            for number in range(1, 7):
                slow.call(number, PATH, message(60))
            # One that waits, and two with places.
            await eventually(lambda: (num_calls(orchestrator), admission.num_waiting) == (3, 3))
            await asyncio.sleep(0.2)
            if ends:
                await eventually(lambda: orchestrator.service.num_requests == 0)
            else:
                assert (num_calls(orchestrator), admission.num_waiting) == (3, 3)
        await eventually(lambda: num_calls(orchestrator) == orchestrator.service.num_requests == 0)


async def test_a_client_that_is_slow_to_look_is_not_ended(start_fakes: StartFakes) -> None:
    """What its library has taken for it counts as taken."""
    async with start_fakes(FakeVerifier(), unread_s=0.2) as (client, _), Client(client.address) as slow:
        chunks = aiter(slow.stream(PROMPT, Options(max_tokens=60, seed=7)))
        tokens = list((await anext(chunks)).token_ids)
        await asyncio.sleep(0.6)
        async for chunk in chunks:
            tokens.extend(chunk.token_ids)
        assert tokens == plain(babble, PROMPT, 60, 7)
