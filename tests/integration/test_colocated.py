"""All services in one process, with the bundled models: the same tokens in every form, and failures that cost none."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from coppice.checkpoints.bundled import MODELS
from coppice.client import Client, Options
from coppice.colocated.app import Colocated, LoadedModels, load, running
from coppice.colocated.config import ColocatedConfig
from coppice.colocated.exchange import Pipe
from coppice.v1 import inference_pb2
from tests.fakes import eventually
from verifier_svc.engine.engine import Engine

# The first to use them may have to compile the models' loops.
pytestmark = pytest.mark.timeout(480)

PROMPT = "import os\n\n\ndef count_lines(path):\n"
GREEDY = Options(max_tokens=24, ignore_eos=True, speculation="small-lm")
SEEDED = replace(GREEDY, temperature=1.0, top_k=40, seed=13)
ENV = {
    "VERIFIER_MODEL": str(MODELS / "target"),
    "DRAFTERS": f"small-lm={MODELS / 'small-lm'}",
    "DEVICE": "cpu",
    "KV_CACHE_MIB": "64",
    "THREADS": "1",
    "GRACE_S": "1",
    # Asynchronous rounds, too, have their drafts on a busy machine.
    "LINGER_MS": "10000",
}


@pytest.fixture(scope="module")
def models() -> Iterator[LoadedModels]:
    """Loaded once: deployments come one after the other."""
    before = torch.get_num_threads()
    # Of the thread that loads: others may have the cores.
    torch.set_num_threads(1)
    yield load(ColocatedConfig.from_env(ENV))
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tokens() -> dict[Options, tuple[int, ...]]:
    """What plain decoding said first, by options."""
    return {}


@asynccontextmanager
async def deployed(models: LoadedModels, **settings: str) -> AsyncIterator[tuple[Client, Colocated]]:
    config = ColocatedConfig.from_env({**ENV, **settings})
    wanted = replace(models, drafters=models.drafters * len(config.drafters))
    async with (
        running(config, wanted, env={}) as deployment,
        Client(deployment.orchestrator.address) as client,
    ):
        yield client, deployment


async def check_tokens(client: Client, tokens: dict[Options, tuple[int, ...]]) -> int:
    """Speculation changes no token, whatever the form; returns how many draft nodes were accepted."""
    accepted = 0
    for options in (GREEDY, SEEDED):
        plain = await client.generate(PROMPT, replace(options, speculation="off"))
        drafted = await client.generate(PROMPT, options)
        assert plain.speculation.draft_tokens == 0
        assert drafted.token_ids == plain.token_ids == tokens.setdefault(options, plain.token_ids)
        accepted += drafted.speculation.accepted_tokens
    return accepted


@pytest.mark.parametrize("rounds", ["asynchronous", "synchronous"])
async def test_one_process_gives_the_same_tokens_and_no_message_is_changed_once_it_is_sent(
    models: LoadedModels, tokens: dict[Options, tuple[int, ...]], rounds: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[Any, bytes]] = []
    put = Pipe.put

    async def keep(self: Pipe[Any], message: Any) -> None:
        sent.append((message, message.SerializeToString(deterministic=True)))
        await put(self, message)

    monkeypatch.setattr(Pipe, "put", keep)
    before = set(threading.enumerate())
    async with deployed(models, COPPICE_LAB=json.dumps({"rounds": rounds})) as (client, deployment):
        assert await check_tokens(client, tokens) > 8
        assert deployment.orchestrator.verifiers.num_sequences == 0
    assert len(sent) > 50
    for message, content in sent:
        assert message.SerializeToString(deterministic=True) == content
    left = {thread.name for thread in set(threading.enumerate()) - before}
    assert not left & {"verifier-model", "drafter-model"}


async def test_synchronous_rounds_verify_the_draft_that_was_made_for_them_and_drop_nothing(
    models: LoadedModels, tokens: dict[Options, tuple[int, ...]]
) -> None:
    async with deployed(models, COPPICE_LAB='{"rounds": "synchronous"}', CACHE_DRAFTER="false") as (client, deployment):
        info = await client.model_info()
        assert info.rounds == inference_pb2.ROUNDS_SYNCHRONOUS
        result = await client.generate(PROMPT, GREEDY)
        tally = deployment.orchestrator.service.tally
        # But for the prompt's round, and the last one where no place is left for a draft, each has had its own.
        assert result.speculation.rounds >= 3
        assert sum(tally.stale().values()) <= 1
        assert result.speculation.draft_tokens >= result.speculation.rounds - 2
    assert tokens.setdefault(GREEDY, result.token_ids) == result.token_ids


@pytest.mark.parametrize("rounds", ["asynchronous", "synchronous"])
async def test_a_drafter_whose_thread_raises_or_whose_stream_ends_costs_no_request(
    models: LoadedModels, tokens: dict[Options, tuple[int, ...]], rounds: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with deployed(models, COPPICE_LAB=json.dumps({"rounds": rounds})) as (client, deployment):
        expected = await client.generate(PROMPT, replace(SEEDED, speculation="off"))
        assert tokens.setdefault(SEEDED, expected.token_ids) == expected.token_ids
        [drafters] = deployment.drafters
        asking = asyncio.create_task(client.generate(PROMPT, SEEDED))
        lost = deployment.orchestrator.drafters.clients[0].stream
        await eventually(lambda: deployment.orchestrator.verifiers.num_sequences > 0)
        drafters.drop_calls()
        assert (await asking).token_ids == expected.token_ids
        assert lost.num_lost == 1
        await eventually(lambda: lost.connected)
        # It serves again; then the model fails in the middle of a request.
        drafter = models.drafters[0]
        opened = drafter.open

        def fails_later(*arguments: Any, **named: Any) -> Any:
            sequence = opened(*arguments, **named)
            extend = sequence.extend

            def broken(*arguments: Any) -> None:
                extend(*arguments)
                raise RuntimeError("no memory")

            monkeypatch.setattr(sequence, "extend", broken)
            return sequence

        monkeypatch.setattr(drafter, "open", fails_later)
        assert (await client.generate(PROMPT, SEEDED)).token_ids == expected.token_ids
        monkeypatch.undo()
        assert deployment.orchestrator.drafters.clients[0].num_dropped == 1
        again = await client.generate(PROMPT, SEEDED)
        assert again.token_ids == expected.token_ids
        assert again.speculation.draft_tokens > 0


async def test_it_says_that_a_model_thread_has_ended(models: LoadedModels, monkeypatch: pytest.MonkeyPatch) -> None:
    def end(engine: Engine) -> None:
        raise MemoryError("no room for a plan")

    async with deployed(models) as (client, deployment):
        await client.generate(PROMPT, replace(GREEDY, max_tokens=2))
        assert not deployment.lost.is_set()
        monkeypatch.setattr(Engine, "step", end)
        waits = asyncio.create_task(client.generate(PROMPT, GREEDY, timeout_s=20.0))
        async with asyncio.timeout(10):
            await deployment.lost.wait()
        waits.cancel()
