"""Failures inside the services, again and again under many requests: who is hit fails alone, and nothing is left."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
import pytest_asyncio

from coppice.client import Client, Options, RequestFailedError
from orchestrator.app import Orchestrator, running
from orchestrator.config import Config
from tests.fakes import eventually
from tests.tiny_services import tiny_drafter, tiny_verifier

# Where something is raised, and what a library would raise there.
FAILPOINTS: dict[str, tuple[str, Callable[[], Exception]]] = {
    "laying out a pass": ("verifier_svc.model.target_model.TargetModel.plan", lambda: RuntimeError("no memory")),
    "a pass": ("verifier_svc.model.target_model.TargetModel.forward", lambda: RuntimeError("a kernel failed")),
    "reading a prompt": ("drafter_svc.session.Session.read", lambda: RuntimeError("a kernel failed")),
    "a draft": ("drafter_svc.session.Session.advance", lambda: ValueError("nan")),
    "a drafter's tree": ("orchestrator.request.drafting.Drafting.on_tree", lambda: KeyError("a bug")),
    "an outcome": ("orchestrator.request.generation.Generation.on_outcome", lambda: KeyError("a bug")),
}
# Drafts are nobody's loss.
HARMLESS = {"reading a prompt", "a draft", "a drafter's tree"}
# One call of so many fails. A pass that does takes all requests with it that run in it.
EVERY = 20
NUM_REQUESTS, AT_ONCE, TOKENS = 24, 6, 24
# As in the fault run: what a client may be told, and INTERNAL where the fault is ours.
FAILURES = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE}


class Failpoint:
    """Raises in one call of so many of a method."""

    def __init__(self, method: Callable[..., Any], error: Callable[[], Exception], every: int) -> None:
        self._method, self._error, self._every = method, error, every
        self._calls = itertools.count(1)
        self.num_raised = 0

    def method(self) -> Callable[..., Any]:
        """What takes the method's place."""

        def call(*arguments: Any, **named: Any) -> Any:
            if next(self._calls) % self._every == 0:
                self.num_raised += 1
                raise self._error()
            return self._method(*arguments, **named)

        return call


def found(path: str) -> tuple[Any, str]:
    """The class of a method's path, and the method's name."""
    module, owner, name = path.rsplit(".", 2)
    return getattr(__import__(module, fromlist=[owner]), owner), name


async def answer(client: Client, seed: int) -> tuple[int, ...] | RequestFailedError:
    options = Options(max_tokens=TOKENS, temperature=float(seed % 2), seed=seed, ignore_eos=True)
    try:
        return (await client.generate([5, 6, 7 + seed % 9], options, timeout_s=30)).token_ids
    except RequestFailedError as error:
        return error


async def answers(client: Client) -> list[tuple[int, ...] | RequestFailedError]:
    places = asyncio.Semaphore(AT_ONCE)

    async def one(seed: int) -> tuple[int, ...] | RequestFailedError:
        async with places:
            return await answer(client, seed)

    return await asyncio.gather(*(one(seed) for seed in range(NUM_REQUESTS)))


def left(orchestrator: Orchestrator) -> int:
    return orchestrator.verifiers.num_sequences + orchestrator.service.num_requests


@dataclass(frozen=True)
class Services:
    """All three for all tests, since each leaves them as they were; what they answer undisturbed."""

    orchestrator: Orchestrator
    client: Client
    undisturbed: list[tuple[int, ...] | RequestFailedError]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def services() -> AsyncIterator[Services]:
    async with tiny_verifier([]) as verifier, tiny_drafter([]) as drafter:
        config = Config(
            verifier_address=verifier,
            drafter_addresses=(drafter,),
            connect_timeout_s=10.0,
            grace_s=0.0,
            planner="fixed",
        )
        async with running(config) as orchestrator, Client(orchestrator.address) as client:
            yield Services(orchestrator, client, await answers(client))


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", FAILPOINTS)
async def test_who_is_hit_fails_alone_and_nothing_is_left(
    name: str, services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, error = FAILPOINTS[name]
    owner, method = found(path)
    failpoint = Failpoint(getattr(owner, method), error, EVERY)
    with monkeypatch.context() as patched:
        patched.setattr(owner, method, failpoint.method())
        disturbed = await answers(services.client)
    ends = Counter(
        end.code if isinstance(end, RequestFailedError) else "same" if end == plain else "wrong"
        for plain, end in zip(services.undisturbed, disturbed, strict=True)
    )
    assert failpoint.num_raised > 0
    assert ends.keys() <= {"same", *FAILURES}, ends
    assert ends["same"] > NUM_REQUESTS / 4, ends
    if name in HARMLESS:
        assert ends["same"] == NUM_REQUESTS, ends
    assert await answers(services.client) == services.undisturbed
    await eventually(lambda: left(services.orchestrator) == 0)
