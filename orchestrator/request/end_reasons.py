"""Names of ends of requests and outputs in metrics and traces."""

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

# Reason of a refusal or failure by error class; the first match counts, anything else is an internal error.
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
# Refusals of admission control, which no running output can have.
_BY_ADMISSION = ("queue_full", "no_time", "long_wait", "crowded_out", "tenant_limit")
REFUSALS = tuple(reason for reason in FAILURES if reason not in ("verifier_full", "unread"))
FINISHES = tuple(
    name.removeprefix("FINISH_REASON_").lower()
    for name, number in sampling_pb2.FinishReason.items()
    if number != sampling_pb2.FINISH_REASON_UNSPECIFIED
)
ENDS = (*FINISHES, *(reason for reason in FAILURES if reason not in _BY_ADMISSION))


def finish_name(finish: Finish) -> str:
    """Name of a finish reason in the API."""
    return sampling_pb2.FinishReason.Name(finish.reason).removeprefix("FINISH_REASON_").lower()


def reason_of(error: BaseException) -> str:
    """Reason of a refusal or failure, one of FAILURES."""
    return next((reason for kind, reason in _REASONS if isinstance(error, kind)), INTERNAL)
