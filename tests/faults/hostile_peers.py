"""A verifier and a drafter that answer with hostile messages, and a door through which requests meet them."""

from __future__ import annotations

import contextlib
import logging
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.rpc import code_pb2

from coppice.core.errors import CoppiceError
from coppice.v1 import drafter_pb2, verifier_pb2
from orchestrator.app import Orchestrator
from tests.fakes import FakeDrafter, FakeVerifier
from tests.faults.fuzz import Context, FuzzError, generate, sensible_request
from tests.faults.messages import SEQUENCE_IDS, hostile, mutated

# Of the messages that a hostile verifier sends while it runs a sequence, and of its descriptions.
HOSTILE_SHARE, HOSTILE_DESCRIPTIONS = 0.15, 0.5
# After how many hostile messages a hostile verifier drops its stream, on average.
DROP_EVERY = 150
# A hostile verifier may never say that a sequence has finished.
REQUEST_S = 2.0
# What a request may end with, whatever its verifier says: all permit a retry.
RETRIED = frozenset({"OK", "UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"})
# Loggers that tell of errors that nobody expects.
_LOGGERS = ("orchestrator", "coppice", "asyncio")


@dataclass
class HostileVerifier(FakeVerifier):
    """Serves the toy target; while hostile, it changes what it says, adds to it and leaves it out."""

    chance: random.Random = field(default_factory=lambda: random.Random(0))
    is_hostile: bool = False
    num_hostile: int = 0
    # Whether the orchestrator has been given a changed description.
    has_misled: bool = False
    # Names of the codes of errors that it sent.
    codes: set[str] = field(default_factory=set)

    async def Describe(self, request: Any, context: Any) -> verifier_pb2.VerifierServiceDescribeResponse:  # noqa: N802
        described = await super().Describe(request, context)
        if self.is_hostile and self.chance.random() < HOSTILE_DESCRIPTIONS:
            self.num_hostile += 1
            self.has_misled = True
            return mutated(described, self.chance)
        return described

    async def Verify(self, requests: Any, context: Any) -> AsyncIterator[verifier_pb2.VerifyResponse]:  # noqa: N802
        async with contextlib.aclosing(super().Verify(requests, context)) as responses:
            async for response in responses:
                if not self.is_hostile or self.chance.random() > HOSTILE_SHARE:
                    yield response
                    continue
                for message in self._instead_of(response):
                    self.num_hostile += 1
                    if message.HasField("error"):
                        self.codes.add(code_name(message.error.code))
                    yield message
                if self.chance.randrange(DROP_EVERY) == 0:
                    await context.abort(grpc.StatusCode.INTERNAL, "x" * 5_000)

    def _instead_of(self, response: verifier_pb2.VerifyResponse) -> list[verifier_pb2.VerifyResponse]:
        messages = [mutated(response, self.chance)]
        for message in filter(None, (hostile(verifier_pb2.VerifyResponse, self.chance) for _ in range(2))):
            if message.sequence_id in SEQUENCE_IDS and self.chance.random() < 0.5:
                message.sequence_id = response.sequence_id
            messages.append(message)
        if self.chance.random() < 0.5:
            messages.append(response)
        self.chance.shuffle(messages)
        return messages


class HostileDrafter(FakeDrafter):
    """Says anything, mostly of sequences that there are."""

    async def Draft(self, requests: Any, context: Any) -> AsyncIterator[drafter_pb2.DraftResponse]:  # noqa: N802
        chance = random.Random(8)
        async for request in requests:
            for message in filter(None, (hostile(drafter_pb2.DraftResponse, chance) for _ in range(6))):
                if chance.random() < 0.8:
                    message.sequence_id = request.sequence_id
                self.num_trees += 1
                yield message


class UnexpectedErrors(logging.Handler):
    """Errors that services log with a traceback: what they raise of their own accord, and what is a bug of theirs."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.raised: list[CoppiceError] = []
        self.bugs: list[BaseException] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the record's exception."""
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, CoppiceError):
            self.raised.append(error)
        elif error is not None:
            self.bugs.append(error)

    @contextlib.contextmanager
    def watching(self) -> Iterator[UnexpectedErrors]:
        """Keep what is logged while the context is open."""
        loggers = [logging.getLogger(name) for name in _LOGGERS]
        before = [(logger.level, logger.propagate) for logger in loggers]
        for logger in loggers:
            logger.setLevel(logging.ERROR)
            logger.propagate = False
            logger.addHandler(self)
        try:
            yield self
        finally:
            for logger, (level, propagates) in zip(loggers, before, strict=True):
                logger.removeHandler(self)
                logger.setLevel(level)
                logger.propagate = propagates


class PeersDoor:
    """Answers of a verifier and a drafter, met by requests of an orchestrator."""

    name = "peers"
    at_once = 8

    def __init__(
        self,
        orchestrator: Orchestrator,
        verifier: HostileVerifier,
        drafter: HostileDrafter,
        errors: UnexpectedErrors,
    ) -> None:
        self._orchestrator = orchestrator
        self._verifier = verifier
        self._drafter = drafter
        self._errors = errors
        self._counted = 0

    async def converse(self, chance: random.Random, counts: Counter[str]) -> None:
        if not self._verifier.is_hostile:
            self._verifier.is_hostile, self._verifier.chance = True, chance
        request = sensible_request(chance.randint(1, 40), chance.randrange(100))
        request.num_outputs = chance.choice((1, 1, 3))
        if chance.random() < 0.5:
            request.response.text, request.response.top_log_probs = True, 2
        context: Any = Context(time_left_s=REQUEST_S)
        num_raised = len(self._errors.raised)
        messages = await generate(self._orchestrator.service, request, context)
        self._count(counts)
        counts[context.code] += 1
        if self._errors.bugs:
            raise FuzzError(f"a bug: {self._errors.bugs[0]!r}") from self._errors.bugs[0]
        ended = Counter(message.output_index for message in messages if message.HasField("finished"))
        if context.code == "OK" and ended != Counter(range(request.num_outputs)):
            raise FuzzError(f"ends of outputs: {ended}")
        if context.code == "INTERNAL":
            told = [str(error) for error in self._errors.raised[num_raised:]]
            if not any("verifier" in text for text in told):
                raise FuzzError(f"INTERNAL, and the log does not name the verifier: {told}")
        elif context.code not in RETRIED | self._verifier.codes:
            raise FuzzError(f"{context.code}, which the verifier has not said")

    async def check(self) -> Sequence[int]:
        self._verifier.is_hostile = False
        self._verifier.forget()
        self._drafter.forget()
        self._errors.raised.clear()
        client = self._orchestrator.verifiers.clients[0]
        if self._verifier.has_misled:
            self._verifier.has_misled = False
            client.stream.drop()
            # A stream that is being opened cannot be dropped.
            while not client.stream.connected:
                await client.stream.changed()
        context: Any = Context()
        messages = await generate(self._orchestrator.service, sensible_request(12, 3), context)
        if context.code != "OK":
            raise FuzzError(f"{context.code} by a good verifier")
        return [token for message in messages for token in message.token_ids]

    def left(self) -> str:
        parts = {
            "requests": self._orchestrator.service.num_requests,
            "sequences at verifiers": self._orchestrator.verifiers.num_sequences,
            "sequences at drafters": sum(client.num_sequences for client in self._orchestrator.drafters.clients),
        }
        return ", ".join(f"{count} {name}" for name, count in parts.items() if count)

    def _count(self, counts: Counter[str]) -> None:
        """Add the hostile messages since the last conversation."""
        total = self._verifier.num_hostile + self._drafter.num_trees
        counts["messages"] += total - self._counted
        self._counted = total


def code_name(code: int) -> str:
    """Name of a google.rpc.Code that a peer sent."""
    return code_pb2.Code.Name(code) if code in code_pb2.Code.values() else f"code {code}"
