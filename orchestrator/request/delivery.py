"""Delivery of outputs to clients that may read slowly: when places are freed, and when calls are ended."""

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

# Bytes of finished but undelivered outputs per connection. Beyond it an output keeps its places until it is
# delivered.
MAX_UNDELIVERED_BYTES = 16 * 1024 * 1024
# Approximate size of an undelivered token in Python (id and text), and of each of its log-probabilities.
TOKEN_BYTES = 128
LOG_PROB_BYTES = 128
# Checks per `unread_s`.
LOOKS = 4


class Undelivered:
    """Bytes of finished outputs that wait for their clients, by connection."""

    def __init__(self, max_bytes: int = MAX_UNDELIVERED_BYTES) -> None:
        self._max_bytes = max_bytes
        self._bytes: Counter[str] = Counter()

    @property
    def num_bytes(self) -> int:
        """Total over all connections."""
        return self._bytes.total()

    def keep(self, peer: str, num_bytes: int) -> bool:
        """Count bytes for a connection; False, without counting them, if it would exceed its limit."""
        if self._bytes[peer] + num_bytes > self._max_bytes:
            return False
        self._bytes[peer] += num_bytes
        return True

    def drop(self, peer: str, num_bytes: int) -> None:
        """Discount bytes that were delivered or dropped."""
        self._bytes[peer] -= num_bytes
        if not self._bytes[peer]:
            del self._bytes[peer]


class Delivery:
    """Frees a request's places when its outputs have ended, before they are delivered.

    Its bytes count as undelivered until the context is left.
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
            # Its retry delay is estimated with its own places in use.
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
    """Approximate bytes of the tokens; `top_log_probs` is per token in addition to its own, None without any."""
    num_log_probs = 0 if top_log_probs is None else 1 + top_log_probs
    return num_tokens * (TOKEN_BYTES + LOG_PROB_BYTES * num_log_probs)


class UnreadWatch:
    """Calls `end` when the client leaves a message unread for `unread_s` seconds; 0: never."""

    def __init__(self, outputs: Outputs, unread_s: float, end: Callable[[CoppiceError], None]) -> None:
        self._outputs = outputs
        self._unread_s = unread_s
        self._end = end
        self._timer: asyncio.TimerHandle | None = None
        # Message offered at the last check, and successive checks that saw the same one.
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
        logger.info("ending a call: its client left a message unread for %.3g s", self._unread_s)
        self._end(UnreadError(f"a message was not taken for {self._unread_s:.3g} s"))
