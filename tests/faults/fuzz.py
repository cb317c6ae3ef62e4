"""Fuzzing at the servers' doors, in process: no message of a peer may crash, hang or bloat a service, nor be its fault.

Each door is a real servicer on a real engine or drafter; only the socket is left out, so that 10^5 messages take
minutes. Between conversations a door is asked something sensible, whose answer must be what it always was.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc
from google.protobuf.message import Message
from google.rpc import code_pb2

from coppice.v1 import drafter_pb2, inference_pb2, sampling_pb2, verifier_pb2
from drafter_svc.service import DrafterService
from orchestrator.api.service import InferenceService
from tests.fakes import FakeDrafter, FakeVerifier
from tests.faults.messages import PROMPT, hostile
from tests.faults.processes import resident_mib
from verifier_svc.engine.engine import Engine
from verifier_svc.service import VerifierServicer

# A conversation that takes longer hangs.
DEADLINE_S = 20.0
# How often a door is asked something sensible.
CHECK_EVERY = 25
# A door may grow by this much over a run, after its first fifth: caches fill, and allocators keep what they had.
MAX_GROWTH_MIB = 64.0
# Fewer messages say nothing about growth: a fifth warms nothing, and the suite's process holds memory of other tests.
MIN_MESSAGES_FOR_GROWTH = 1_000
# Statuses that would blame the server for what its peer said, or say nothing.
SERVERS_FAULTS = frozenset({"INTERNAL", "UNKNOWN", "DATA_LOSS"})
# Three of four are the calls that cost most.
PUBLIC_REQUESTS = (
    *(inference_pb2.GenerateRequest,) * 12,
    inference_pb2.TokenizeRequest,
    inference_pb2.DetokenizeRequest,
    inference_pb2.WatchRoundsRequest,
    inference_pb2.GetModelInfoRequest,
)
_MAX_RESPONSES = 12
_ALL = 10_000


class FuzzError(AssertionError):
    """A service did what it must not do; the message names the seed that gives it again."""


class Door(Protocol):
    """One service, as its peers reach it."""

    name: str
    # Conversations at once: more than a service has places for would mostly be refused for that.
    at_once: int

    async def converse(self, chance: random.Random, counts: Counter[str]) -> None:
        """One call, or one stream, with messages of `chance`; counts messages and what they were answered with."""

    async def check(self) -> Sequence[int]:
        """Tokens of a sensible request, which are always the same."""

    def left(self) -> str:
        """What peers that are gone have left behind; empty when nothing."""


@dataclass
class Context:
    """What a servicer sees of a call; a call that is aborted ends there, as it does in gRPC."""

    sent: list[Any] = field(default_factory=list)
    code: str = "OK"
    time_left_s: float = DEADLINE_S
    on_write: Callable[[Any], None] = lambda message: None

    async def send_initial_metadata(self, initial_metadata: Any) -> None:
        """Headers before the first message."""

    async def write(self, message: Any) -> None:
        """Take a message, which must be one that can be sent."""
        message.SerializeToString()
        self.sent.append(message)
        self.on_write(message)

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> None:
        self.code = code.name
        raise grpc.aio.AbortError(details)

    async def abort_with_status(self, status: Any) -> None:
        await self.abort(status.code)

    def time_remaining(self) -> float:
        return self.time_left_s

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()


class PublicDoor:
    """The public API of an orchestrator, but for what is read of its rounds beyond the first messages."""

    name = "orchestrator"
    at_once = 25

    def __init__(self, service: InferenceService, verifier: FakeVerifier, drafter: FakeDrafter) -> None:
        self._service = service
        self._peers = verifier, drafter

    async def converse(self, chance: random.Random, counts: Counter[str]) -> None:
        kind = chance.choice(PUBLIC_REQUESTS)
        request = hostile(kind, chance)
        if request is None:
            counts["unreadable"] += 1
            return
        counts["messages"] += 1
        context: Any = Context()
        # Clients leave when they have had enough.
        most = chance.choice((1, 3, _MAX_RESPONSES))
        with contextlib.suppress(grpc.aio.AbortError):
            if isinstance(request, inference_pb2.GenerateRequest):
                await generate(self._service, request, context, most)
            elif isinstance(request, inference_pb2.WatchRoundsRequest):
                # The first message is the load; the second may have to wait for half a second.
                await _read(self._service.WatchRounds(request, context), context, 1)
            else:
                answer = getattr(self._service, kind.DESCRIPTOR.name.removesuffix("Request"))
                await context.write(await answer(request, context))
        counts[context.code] += 1
        if context.code in SERVERS_FAULTS:
            raise FuzzError(f"{context.code} to {request}")

    async def check(self) -> Sequence[int]:
        for peer in self._peers:
            # Of a million messages, they would be most of the memory.
            peer.forget()
        text = "".join(map(chr, PROMPT))
        tokenized = await self._service.Tokenize(inference_pb2.TokenizeRequest(prompt=text), Context())
        request = inference_pb2.DetokenizeRequest(token_ids=tokenized.token_ids)
        if (again := (await self._service.Detokenize(request, Context())).text) != text:
            raise FuzzError(f"the {self.name} says {again!r} and not {text!r}")
        messages = await generate(self._service, sensible_request(12, 3), Context())
        return [token for message in messages for token in message.token_ids]

    def left(self) -> str:
        return f"{self._service.num_requests} requests" if self._service.num_requests else ""


def sensible_request(max_tokens: int, seed: int) -> inference_pb2.GenerateRequest:
    """A valid request for tokens."""
    request = inference_pb2.GenerateRequest(response=inference_pb2.ResponseOptions(token_ids=True))
    request.token_ids.ids.extend(PROMPT)
    request.sampling.temperature, request.sampling.seed = 1.0, seed
    request.stopping.max_tokens = max_tokens
    return request


async def generate(
    service: InferenceService, request: inference_pb2.GenerateRequest, context: Context, most: int = _ALL
) -> list[Any]:
    """The first messages of an answer; the context has its status."""
    return await _read(service.Generate(request, context), context, most)


async def _read(responses: Any, context: Context, most: int) -> list[Any]:
    """The first messages of a stream, which is then left."""
    messages: list[Any] = []
    async with contextlib.aclosing(responses):
        with contextlib.suppress(grpc.aio.AbortError):
            async for message in responses:
                await context.write(message)
                messages.append(message)
                if len(messages) >= most:
                    break
    return messages


class VerifierDoor:
    """Verify of a verifier, whose engine runs."""

    name = "verifier"
    at_once = 2

    def __init__(self, engine: Engine, servicer: VerifierServicer) -> None:
        self._engine = engine
        self._servicer = servicer

    async def converse(self, chance: random.Random, counts: Counter[str]) -> None:
        messages = stream_of(verifier_pb2.VerifyRequest, chance, counts)
        context: Any = Context()
        await _aborted_or_over(self._servicer.Verify(_taking_turns(messages, chance), context))
        for response in context.sent:
            kind = response.WhichOneof("event")
            counts[kind] += kind != "load"
            _check_code(getattr(response, kind).code if kind in ("error", "draft_rejected") else 0, messages)
        _check_call(context, messages)

    async def check(self) -> Sequence[int]:
        opening = verifier_pb2.OpenSequence(
            prompt_token_ids=PROMPT,
            sampling=sampling_pb2.SamplingParams(temperature=1.0, seed=3),
            stopping=sampling_pb2.StoppingOptions(max_tokens=12, ignore_eos=True),
        )
        context: Any = Context()
        over = asyncio.Event()
        context.on_write = lambda response: over.set() if response.HasField("finished") else None

        async def requests() -> AsyncIterator[verifier_pb2.VerifyRequest]:
            yield verifier_pb2.VerifyRequest(sequence_id=7, open=opening)
            await over.wait()

        await self._servicer.Verify(requests(), context)
        return [token for response in context.sent for token in response.outcome.token_ids]

    def left(self) -> str:
        engine = self._engine
        held = engine.cache.num_blocks - engine.cache.num_free_blocks
        parts = {
            "blocks": held,
            "running sequences": engine.scheduler.num_running,
            "waiting sequences": engine.scheduler.num_waiting,
        }
        return ", ".join(f"{count} {name}" for name, count in parts.items() if count)


class DrafterDoor:
    """Draft of a drafter, whose model thread runs."""

    name = "drafter"
    at_once = 2

    def __init__(self, service: DrafterService) -> None:
        self._service = service

    async def converse(self, chance: random.Random, counts: Counter[str]) -> None:
        messages = stream_of(drafter_pb2.DraftRequest, chance, counts)
        context: Any = Context()
        await _aborted_or_over(self._service.Draft(_taking_turns(messages, chance), context))
        for response in context.sent:
            kind = response.WhichOneof("event")
            counts[kind] += 1
            _check_code(response.error.code if kind == "error" else 0, messages)
        _check_call(context, messages)

    async def check(self) -> Sequence[int]:
        async def requests() -> AsyncIterator[drafter_pb2.DraftRequest]:
            opening = drafter_pb2.OpenDraft(
                prompt_token_ids=PROMPT, sampling=sampling_pb2.SamplingParams(temperature=0.0), max_nodes=6
            )
            yield drafter_pb2.DraftRequest(sequence_id=7, open=opening)

        context: Any = Context()
        await self._service.Draft(requests(), context)
        return list(context.sent[0].tree.tree.token_ids)

    def left(self) -> str:
        return f"{self._service.num_sequences} sequences" if self._service.num_sequences else ""


async def fuzz(door: Door, num_messages: int, seed: int, tell: Callable[[str], None] = lambda _: None) -> Counter[str]:
    """Send so many messages through a door, and return what they were answered with.

    Raises:
        FuzzError: a conversation hung, was blamed on the server, changed a sensible answer, or left something behind.
    """
    counts: Counter[str] = Counter()
    expected = list(await door.check())
    if not expected:
        raise FuzzError(f"the {door.name} says nothing at all")
    warm_mib = 0.0
    places = asyncio.Semaphore(door.at_once)
    while counts["messages"] < num_messages:
        first = counts["conversations"]
        try:
            async with asyncio.TaskGroup() as together:
                for number in range(first, first + CHECK_EVERY):
                    together.create_task(_attempt(door, seed, number, places, counts))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        counts["conversations"] += CHECK_EVERY
        async with asyncio.timeout(DEADLINE_S):
            if (tokens := list(await door.check())) != expected:
                raise FuzzError(f"the {door.name} says {tokens} and not {expected} after seed {seed}, {first}")
        counts["checks"] += 1
        if not warm_mib and counts["messages"] >= num_messages / 5:
            warm_mib = resident_mib()
        if counts["checks"] % 20 == 0:
            tell(f"{door.name}: {counts['messages']:,} messages")
    await _nothing_left(door)
    if num_messages >= MIN_MESSAGES_FOR_GROWTH:
        counts["grown MiB"] = round(resident_mib() - warm_mib)
        if counts["grown MiB"] > MAX_GROWTH_MIB:
            raise FuzzError(f"the {door.name} grew by {counts['grown MiB']} MiB")
    return counts


def stream_of(kind: type[Any], chance: random.Random, counts: Counter[str]) -> list[Any]:
    """Messages for one stream, in an order that need make no sense."""
    messages = [hostile(kind, chance) for _ in range(chance.choice((1, 5, 20, 40)))]
    readable = [message for message in messages if message is not None]
    counts["unreadable"] += len(messages) - len(readable)
    counts["messages"] += len(readable)
    return readable


async def _attempt(door: Door, seed: int, number: int, places: asyncio.Semaphore, counts: Counter[str]) -> None:
    chance = random.Random(f"{seed}/{door.name}/{number}")
    where = f"seed {seed}, number {number}"
    async with places:
        try:
            async with asyncio.timeout(DEADLINE_S):
                await door.converse(chance, counts)
        except TimeoutError:
            raise FuzzError(f"the {door.name} hangs ({where})") from None
        except FuzzError as error:
            raise FuzzError(f"{error} ({where})") from None


async def _nothing_left(door: Door) -> None:
    """What peers leave behind goes soon after them."""
    try:
        async with asyncio.timeout(DEADLINE_S):
            while door.left():  # noqa: ASYNC110 nothing to wait on
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise FuzzError(f"the {door.name} still has {door.left()}") from None


async def _taking_turns(messages: Sequence[Message], chance: random.Random) -> AsyncIterator[Any]:
    """A stream whose messages now come at once, now while the model works on earlier ones."""
    for message in messages:
        yield message
        await asyncio.sleep(chance.choice((0, 0, 0, 0.0005)))


async def _aborted_or_over(call: Any) -> None:
    with contextlib.suppress(grpc.aio.AbortError):
        await call


def _check_code(code: int, messages: Sequence[Message]) -> None:
    name = code_pb2.Code.Name(code) if code in code_pb2.Code.values() else f"code {code}"
    if name in SERVERS_FAULTS:
        raise FuzzError(f"{name} to one of {messages}")


def _check_call(context: Context, messages: Sequence[Message]) -> None:
    if context.code in SERVERS_FAULTS:
        raise FuzzError(f"{context.code} to {messages}")
