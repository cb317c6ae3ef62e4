"""Counts over all requests, past ones included. Running ones are added when read."""

from __future__ import annotations

import logging
from collections import Counter
from types import TracebackType
from typing import TYPE_CHECKING

from orchestrator.request.end_reasons import ENDS, INTERNAL, REFUSALS, finish_name, reason_of
from orchestrator.request.generation import Generation
from orchestrator.request.outputs import Outputs
from orchestrator.request.source_records import SourceRecords
from orchestrator.request.statistics import Statistics

if TYPE_CHECKING:
    from orchestrator.request.latencies import Latencies

logger = logging.getLogger(__name__)


class ServiceCounters:
    """Counts requests; totals are those of ended outputs plus those of running ones.

    Only used on the event loop.
    """

    def __init__(self, latencies: Latencies | None = None) -> None:
        """Without `latencies` no histograms are kept."""
        self.latencies = latencies
        self.num_requests = 0
        self.num_prompt_tokens = 0
        # Refused calls, and ended outputs, by reason.
        self.refused = Counter(dict.fromkeys(REFUSALS, 0))
        self.finished = Counter(dict.fromkeys(ENDS, 0))
        self._ended = Statistics()
        self._num_generated = 0
        self._stale: Counter[str] = Counter()
        # Records of drafters' trees for greedy (True) and sampled (False) requests.
        self.records = {True: SourceRecords(), False: SourceRecords()}
        self._running: dict[Outputs, None] = {}

    def request(self) -> CountedRequest:
        """Count a call while the context is entered."""
        self.num_requests += 1
        return CountedRequest(self)

    def generations(self) -> list[Generation]:
        """Running outputs."""
        return [generation for outputs in self._running for generation in outputs.generations]

    def statistics(self) -> Statistics:
        """Total counts of all outputs."""
        total = Statistics()
        total.add(self._ended)
        for generation in self.generations():
            total.add(generation.statistics)
        return total

    def num_generated(self) -> int:
        """Tokens of all outputs."""
        return self._num_generated + sum(generation.num_generated for generation in self.generations())

    def stale(self) -> Counter[str]:
        """Discarded drafts of all outputs, by reason."""
        total = self._stale.copy()
        for generation in self.generations():
            total.update(generation.stale)
        return total

    def began(self, outputs: Outputs, num_prompt: int) -> None:
        """Record the start of a request with a prompt of `num_prompt` tokens."""
        self._running[outputs] = None
        self.num_prompt_tokens += num_prompt

    def ended(self, outputs: Outputs, error: BaseException | None) -> None:
        """Record the end of a request's outputs, or their abandonment because of an error."""
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
    """One call of Generate, from arrival to end."""

    def __init__(self, tally: ServiceCounters) -> None:
        self._tally = tally
        self._outputs: Outputs | None = None

    def __enter__(self) -> CountedRequest:
        return self

    def began(self, outputs: Outputs, num_prompt: int) -> None:
        """Record that it was admitted."""
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


def _end(generation: Generation, error: BaseException | None) -> str:
    if generation.finish is not None:
        return finish_name(generation.finish)
    cause = generation.error or error
    return INTERNAL if cause is None else reason_of(cause)
