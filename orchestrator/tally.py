"""What has become of all requests so far: counts that outlive them. Nothing is added up while they run."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from types import TracebackType

from coppice.core.errors import (
    DeadlineError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
    UnreadError,
    UnsupportedError,
)
from coppice.v1 import sampling_pb2
from orchestrator.admission.admission import CrowdedOutError, LongWaitError, NoTimeError, QueueFullError
from orchestrator.api.tenancy import TenantLimitError
from orchestrator.planner.source_records import SourceRecords
from orchestrator.request.generation import Generation
from orchestrator.request.latencies import Latencies
from orchestrator.request.outputs import Outputs
from orchestrator.request.rounds import Finish
from orchestrator.request.statistics import Statistics

logger = logging.getLogger(__name__)

# Why a request was refused, or an output came to no end of its own; the first that fits. Anything else is our fault.
_REASONS: tuple[tuple[type[BaseException], str], ...] = (
    (QueueFullError, "queue_full"),
    (NoTimeError, "no_time"),
    (LongWaitError, "long_wait"),
    (CrowdedOutError, "crowded_out"),
    (TenantLimitError, "tenant_limit"),
    (OverloadedError, "verifier_full"),
    (DeadlineError, "deadline"),
    (UnreadError, "unread"),
    (InvalidRequestError, "invalid"),
    (UnsupportedError, "unsupported"),
    (UnavailableError, "unavailable"),
    (asyncio.CancelledError, "cancelled"),
    (GeneratorExit, "cancelled"),
)
INTERNAL = "internal"
FAILURES = tuple(dict.fromkeys([*(reason for _, reason in _REASONS), INTERNAL]))
# What happens before an output begins, and what cannot.
_AT_THE_DOOR = ("queue_full", "no_time", "long_wait", "crowded_out", "tenant_limit")
REFUSALS = tuple(reason for reason in FAILURES if reason not in ("verifier_full", "unread"))
FINISHES = tuple(
    name.removeprefix("FINISH_REASON_").lower()
    for name, number in sampling_pb2.FinishReason.items()
    if number != sampling_pb2.FINISH_REASON_UNSPECIFIED
)
ENDS = (*FINISHES, *(reason for reason in FAILURES if reason not in _AT_THE_DOOR))


class Tally:
    """Counts requests, and adds up what the outputs that have ended counted and those that run have so far.

    Only the event loop touches it.
    """

    def __init__(self, latencies: Latencies | None = None) -> None:
        """Without `latencies` no times are kept."""
        self.latencies = latencies
        self.num_requests = 0
        self.num_prompt_tokens = 0
        # Calls that got no place, by reason; outputs that have ended, by reason.
        self.refused = Counter(dict.fromkeys(REFUSALS, 0))
        self.finished = Counter(dict.fromkeys(ENDS, 0))
        self._ended = Statistics()
        self._num_generated = 0
        self._stale: Counter[str] = Counter()
        # Of drafters' trees, for requests that are greedy and others.
        self.records = {True: SourceRecords(), False: SourceRecords()}
        self._running: dict[Outputs, None] = {}

    def request(self) -> CountedRequest:
        """Count a call while it is entered."""
        self.num_requests += 1
        return CountedRequest(self)

    def generations(self) -> list[Generation]:
        """Outputs that run now."""
        return [generation for outputs in self._running for generation in outputs.generations]

    def statistics(self) -> Statistics:
        """The counts of all outputs, together."""
        total = Statistics()
        total.add(self._ended)
        for generation in self.generations():
            total.add(generation.statistics)
        return total

    def num_generated(self) -> int:
        """Tokens of all outputs."""
        return self._num_generated + sum(generation.num_generated for generation in self.generations())

    def stale(self) -> Counter[str]:
        """Drafts of all outputs that came when they were of no use any more, by reason."""
        total = self._stale.copy()
        for generation in self.generations():
            total.update(generation.stale)
        return total

    def began(self, outputs: Outputs, num_prompt: int) -> None:
        """A request has its places, for outputs behind a prompt of so many tokens."""
        self._running[outputs] = None
        self.num_prompt_tokens += num_prompt

    def ended(self, outputs: Outputs, error: BaseException | None) -> None:
        """A request's outputs have ended, or were left because of an error."""
        del self._running[outputs]
        for generation in outputs.generations:
            self._ended.add(generation.statistics)
            self._num_generated += generation.num_generated
            self._stale.update(generation.stale)
            end = _end(generation, error)
            self.finished[end] += 1
            logger.debug(
                "output ended: %s, after %d tokens in %d rounds",
                end,
                generation.num_generated,
                generation.statistics.rounds,
            )
            if generation.finish is not None and self.latencies is not None:
                clock = generation.clock
                self.latencies.output_ended(generation.num_generated, clock.queue_ms, clock.ttft_ms, clock.elapsed_ms())


class CountedRequest:
    """One call of Generate, from its arrival to its end."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._outputs: Outputs | None = None

    def __enter__(self) -> CountedRequest:
        return self

    def began(self, outputs: Outputs, num_prompt: int) -> None:
        """It has its places."""
        self._outputs = outputs
        self._tally.began(outputs, num_prompt)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._outputs is not None:
            self._tally.ended(self._outputs, error)
        elif error is not None:
            reason = reason_of(error)
            self._tally.refused[reason] += 1
            logger.debug("request refused: %s", reason)


def finish_name(finish: Finish) -> str:
    """Why an output finished, as the API names it."""
    return sampling_pb2.FinishReason.Name(finish.reason).removeprefix("FINISH_REASON_").lower()


def reason_of(error: BaseException) -> str:
    """Why a request was refused or an output ended that came to no end of its own, one of FAILURES."""
    return next((reason for kind, reason in _REASONS if isinstance(error, kind)), INTERNAL)


def _end(generation: Generation, error: BaseException | None) -> str:
    if generation.finish is not None:
        return finish_name(generation.finish)
    cause = generation.error or error
    return INTERNAL if cause is None else reason_of(cause)
