"""A target that is replaced under load: every answer is of one target from beginning to end, and none is lost.

As Kubernetes does it with the chart (docs/upgrades.md): verifiers one after the other, each once the one before has
served for `minReadySeconds`; requests go to the new orchestrator once it is ready, and then the old one stops.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from coppice.client import Client, Options, RequestFailedError
from tests.faults.deployment import Service
from tests.faults.doors import write_checkpoint

NUM_CLIENTS, NUM_CASES, NUM_TOKENS = 4, 12, 40
TIMEOUT_S = 60.0
# Of requests that go on at the old orchestrator, and at verifiers, after they were told to stop.
GRACE_S = "10"
MIN_READY_S = AFTERWARDS_S = 2.0


@dataclass(frozen=True)
class Request:
    prompt: tuple[int, ...]
    options: Options


@dataclass
class Load:
    """Clients that ask whichever orchestrator is ready."""

    address: str
    requests: Sequence[Request]
    answers: list[tuple[Request, tuple[int, ...]]] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    is_over: bool = False

    async def run(self, seed: int) -> None:
        chance = random.Random(seed)
        while not self.is_over:
            address = self.address
            async with Client(address) as client:
                while address == self.address and not self.is_over:
                    await self._ask(client, chance.choice(self.requests))

    async def _ask(self, client: Client, request: Request) -> None:
        try:
            answer = await client.generate(request.prompt, request.options, TIMEOUT_S)
        except RequestFailedError as error:
            self.lost.append(str(error))
        else:
            self.answers.append((request, answer.token_ids))


def drawn_requests() -> list[Request]:
    chance = random.Random(5)
    return [
        Request(
            tuple(chance.randrange(97, 123) for _ in range(chance.choice((1, 5, 60)))),
            Options(temperature=float(index % 2), seed=index, max_tokens=NUM_TOKENS, ignore_eos=True),
        )
        for index in range(NUM_CASES)
    ]


async def plain_answers(address: str, requests: Sequence[Request]) -> dict[Request, tuple[int, ...]]:
    async with Client(address) as client:
        return {
            request: (
                await client.generate(request.prompt, replace(request.options, speculation="off"), TIMEOUT_S)
            ).token_ids
            for request in requests
        }


async def roll_out(
    load: Load, verifiers: Sequence[Service], before: Service, after: Service, settings: dict[str, str]
) -> None:
    """Replace verifiers and orchestrator while requests come; `settings` are the verifiers' new ones."""
    coming = asyncio.create_task(after.start())
    await verifiers[1].stop()
    # The other verifier still serves the old target, and the new orchestrator does not take it.
    await asyncio.sleep(AFTERWARDS_S)
    assert not coming.done()
    verifiers[1].change(**settings)
    await verifiers[1].start()
    await coming
    load.address = after.address
    ending = asyncio.create_task(before.stop())
    # Requests that the old orchestrator still has go on at the old verifier, also while that ends.
    await asyncio.sleep(MIN_READY_S)
    await verifiers[0].stop()
    verifiers[0].change(**settings)
    await asyncio.gather(ending, verifiers[0].start())


@pytest.mark.processes
@pytest.mark.timeout(600)
async def test_each_answer_is_of_one_target_and_none_is_lost(tmp_path: Path) -> None:
    settings: list[dict[str, str]] = []
    for revision in ("old", "new"):
        write_checkpoint(tmp_path / revision, seed=len(settings))
        settings.append({"MODEL": str(tmp_path / revision), "TARGET_REVISION": revision})
    common = {"DEVICE": "cpu", "THREADS": "1", "KV_CACHE_MIB": "1", "GRACE_S": GRACE_S}
    verifiers = [Service(f"verifier {number}", "verifier_svc", {**common, **settings[0]}) for number in (1, 2)]
    addresses = {"VERIFIER_ADDRESS": ",".join(one.address for one in verifiers)}
    before, after = (
        Service(
            f"{revision} orchestrator",
            "orchestrator",
            {**addresses, "GRACE_S": GRACE_S, "CONNECT_TIMEOUT_S": "120", "TARGET_REVISION": revision},
        )
        for revision in ("old", "new")
    )
    load, clients = Load("", drawn_requests()), []
    try:
        await asyncio.gather(*(one.start() for one in verifiers))
        await before.start()
        load.address = before.address
        old = await plain_answers(before.address, load.requests)
        clients += [asyncio.create_task(load.run(seed)) for seed in range(NUM_CLIENTS)]
        await roll_out(load, verifiers, before, after, settings[1])
        await asyncio.sleep(AFTERWARDS_S)
        load.is_over = True
        await asyncio.gather(*clients)
        async with Client(after.address) as client:
            assert (await client.model_info()).num_verifiers == 2
        new = await plain_answers(after.address, load.requests)
    finally:
        load.is_over = True
        for client_task in clients:
            client_task.cancel()
        await asyncio.gather(*(service.stop() for service in (*verifiers, before, after)))
    assert load.lost == []
    assert all(old[request] != new[request] for request in load.requests)
    by_target = [sum(tokens == of[request] for request, tokens in load.answers) for of in (old, new)]
    assert sum(by_target) == len(load.answers)
    assert min(by_target) >= NUM_CLIENTS
