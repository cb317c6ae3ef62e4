"""Outputs on their way to clients that may not take them: what they give back, and when they are ended."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from types import TracebackType

from coppice.core.errors import CoppiceError, OverloadedError, UnreadError
from orchestrator.admission.admission import Ticket
from orchestrator.api.tenant_usage import TenantLease
from orchestrator.api.validation import GenerationRequest
from orchestrator.request.outputs import Outputs

logger = logging.getLogger(__name__)

# What the ended outputs of a connection may take while they wait for their client, in bytes. Beyond that an output
# keeps its places until it is delivered.
MAX_UNDELIVERED_BYTES = 16 * 1024 * 1024
# Roughly what a token takes in Python until it is sent: its id and its text; and what each log-probability adds.
TOKEN_BYTES = 128
LOG_PROB_BYTES = 128
# A client is looked at so many times while it may leave a message unread.
LOOKS = 4


class Undelivered:
    """Counts the bytes of ended outputs that wait for their clients, by connection."""

    def __init__(self, max_bytes: int = MAX_UNDELIVERED_BYTES) -> None:
        self._max_bytes = max_bytes
        self._bytes: Counter[str] = Counter()

    @property
    def num_bytes(self) -> int:
        """Bytes of all connections."""
        return self._bytes.total()

    def keep(self, peer: str, num_bytes: int) -> bool:
        """Count bytes that wait for a connection; False where these would be too many, and none are counted."""
        if self._bytes[peer] + num_bytes > self._max_bytes:
            return False
        self._bytes[peer] += num_bytes
        return True

    def drop(self, peer: str, num_bytes: int) -> None:
        """Bytes that were counted have been delivered, or never will be."""
        self._bytes[peer] -= num_bytes
        if not self._bytes[peer]:
            del self._bytes[peer]


class Delivery:
    """Gives a request's places back as soon as its outputs have ended, while it is entered.

    They may wait for the client for long then, and count as undelivered until it is left.
    """

    def __init__(
        self,
        undelivered: Undelivered,
        peer: str,
        request: GenerationRequest,
        outputs: Outputs,
        ticket: Ticket,
        use: TenantLease,
    ) -> None:
        self._undelivered = undelivered
        self._peer = peer
        self._request = request
        self._outputs = outputs
        self._ticket = ticket
        self._use = use
        self._num_bytes = 0

    def __enter__(self) -> Delivery:
        self._outputs.on_ended = self._ended
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._count_tokens()
        if self._num_bytes:
            self._undelivered.drop(self._peer, self._num_bytes)

    def _ended(self) -> None:
        if any(isinstance(generation.error, OverloadedError) for generation in self._outputs.generations):
            # What it is told of the time until there are places again counts its own.
            return
        num_bytes = output_bytes(self._outputs.num_generated_in_all, self._request.top_log_probs)
        if self._undelivered.keep(self._peer, num_bytes):
            self._num_bytes = num_bytes
            self._count_tokens()
            self._ticket.leave()
            self._use.leave()

    def _count_tokens(self) -> None:
        self._ticket.num_tokens = self._outputs.num_generated
        self._use.num_tokens = len(self._request.prompt_ids) + self._outputs.num_generated_in_all


def output_bytes(num_tokens: int, top_log_probs: int | None) -> int:
    """Roughly the bytes of so many tokens, each with its own log-probability and `top_log_probs` others; None: none."""
    num_log_probs = 0 if top_log_probs is None else 1 + top_log_probs
    return num_tokens * (TOKEN_BYTES + LOG_PROB_BYTES * num_log_probs)


class UnreadWatch:
    """Calls `end` when the client leaves a message for `unread_s` seconds; 0: never."""

    def __init__(self, outputs: Outputs, unread_s: float, end: Callable[[CoppiceError], None]) -> None:
        self._outputs = outputs
        self._unread_s = unread_s
        self._end = end
        self._timer: asyncio.TimerHandle | None = None
        # The message that waited when it last looked, and how often it has seen the same one in a row.
        self._seen: int | None = None
        self._num_looks = 0

    def __enter__(self) -> UnreadWatch:
        if self._unread_s:
            self._wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._unread_s / LOOKS, self._look)

    def _look(self) -> None:
        offered = self._outputs.offered
        self._num_looks = self._num_looks + 1 if offered is not None and offered == self._seen else 0
        self._seen = offered
        if self._num_looks < LOOKS:
            self._wait()
            return
        logger.info("a call is ended: its client has not taken a message for %.3g s", self._unread_s)
        self._end(UnreadError(f"a message was not taken for {self._unread_s:.3g} s"))
