"""Names of how requests and outputs end, as metrics and traces tell them."""

from __future__ import annotations

import asyncio

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
from orchestrator.api.tenant_usage import TenantLimitError
from orchestrator.request.rounds import Finish

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


def finish_name(finish: Finish) -> str:
    """Why an output finished, as the API names it."""
    return sampling_pb2.FinishReason.Name(finish.reason).removeprefix("FINISH_REASON_").lower()


def reason_of(error: BaseException) -> str:
    """Why a request was refused or an output ended that came to no end of its own, one of FAILURES."""
    return next((reason for kind, reason in _REASONS if isinstance(error, kind)), INTERNAL)
