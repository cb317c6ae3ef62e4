"""One request as spans: the call, its phases, and each of its outputs. Attributes: docs/traces.md.

    text_completion ─┬─ tokenize
                     ├─ queue              if it had to wait
                     └─ output, one each ─┬─ prompt, decode
                                          ├─ round …            for the fraction TRACE_ROUNDS of requests
                                          └─ verify, draft      by verifier and drafters

Without round spans a round costs nothing: all attributes come from counts that exist anyway, at the output's end.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from coppice.obs.tracing import TRACEPARENT, Attributes, Span, Tracing
from orchestrator.api.validation import GenerationRequest
from orchestrator.request.end_reasons import finish_name, reason_of
from orchestrator.request.rounds import Finish, Outcome
from orchestrator.request.statistics import OutputClock, Statistics

# Failures that are neither the client's mistake nor its wish.
_FAULTS = frozenset({"deadline", "unavailable", "internal"})


class RequestTrace:
    """Trace of one call of Generate. Without `tracing` it does nothing."""

    def __init__(self, tracing: Tracing | None, metadata: Sequence[tuple[str, Any]] | None, arrival_s: float) -> None:
        self._tracing = tracing
        self._arrival_s = self._validated_s = arrival_s
        self._shows_rounds = False
        self._attributes: dict[str, str | bool | int | float | Sequence[str]] = {}
        self._outputs: list[OutputTrace] = []
        self._span: Span | None = None
        if tracing is not None:
            caller = next((value for key, value in metadata or () if key == TRACEPARENT), "")
            self._span = tracing.tracer.begin("text_completion", caller, start_s=arrival_s, serves=True)
            self._shows_rounds = random.random() < tracing.rounds_share

    def __enter__(self) -> RequestTrace:
        return self

    def validated(self, request: GenerationRequest, model: str, num_outputs: int) -> None:
        """Add the tokenize span and the request's attributes."""
        if self._span is not None:
            self._validated_s = time.monotonic()
            self._span.phase("tokenize", self._arrival_s, self._validated_s)
            self._attributes = _request_attributes(request, model, num_outputs)

    def admitted(self, started_s: float | None) -> None:
        """Add the queue span, if the places came (at `started_s`) after validation."""
        if self._span is not None and started_s is not None and started_s > self._validated_s:
            self._span.phase("queue", self._validated_s, started_s)

    def output(self, index: int) -> OutputTrace | None:
        """Trace of an output that has not started."""
        if self._tracing is None or self._span is None:
            return None
        output = OutputTrace(self._tracing, self._span.traceparent, index, shows_rounds=self._shows_rounds)
        self._outputs.append(output)
        return output

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._span is None:
            return
        attributes = {**self._attributes, "gen_ai.operation.name": "text_completion"}
        if self._outputs:
            attributes["gen_ai.usage.output_tokens"] = sum(output.num_tokens for output in self._outputs)
            attributes["gen_ai.response.finish_reasons"] = [output.reason for output in self._outputs if output.reason]
        reason = "" if error is None else reason_of(error)
        if reason:
            attributes["error.type"] = reason
        self._span.end(attributes, failed=reason in _FAULTS)


class OutputTrace:
    """Trace of one output, from opening its sequence to its end."""

    def __init__(self, tracing: Tracing, parent: str, index: int, *, shows_rounds: bool) -> None:
        self._tracer = tracing.tracer
        self._parent = parent
        self._index = index
        self._shows_rounds = shows_rounds
        self._span: Span | None = None
        self._began_s = self._round_s = 0.0
        # Set at the end: tokens, and the finish reason; empty if it did not finish.
        self.num_tokens = 0
        self.reason = ""

    def begin(self) -> str:
        """Start the span; returns its trace context for the verifier's and drafters' spans."""
        self._began_s = self._round_s = time.monotonic()
        self._span = self._tracer.begin("output", self._parent, start_s=self._began_s)
        return self._span.traceparent

    def opened(self, address: str) -> None:
        """Add an event: a verifier was sent the sequence, for the first time or after a loss."""
        if self._span is not None:
            self._span.event("opened", {"server.address": address})

    def round_over(self, outcome: Outcome) -> None:
        """Add the round's span."""
        if self._shows_rounds and self._span is not None:
            began_s, self._round_s = self._round_s, time.monotonic()
            self._span.phase("round", began_s, self._round_s, _round_attributes(outcome))

    def end(
        self,
        statistics: Statistics,
        clock: OutputClock,
        num_tokens: int,
        finish: Finish | None = None,
        error: BaseException | None = None,
    ) -> None:
        """End the span: it finished, failed with `error`, or was abandoned."""
        span, self._span = self._span, None
        if span is None:
            return
        self.num_tokens = num_tokens
        self.reason = "" if finish is None else finish_name(finish)
        now_s = time.monotonic()
        first_s = clock.first_token_s
        span.phase("prompt", self._began_s, first_s or now_s)
        if first_s is not None:
            span.phase("decode", first_s, now_s)
        failure = "" if finish is not None else "cancelled" if error is None else reason_of(error)
        end = {"gen_ai.response.finish_reasons": [self.reason]} if self.reason else {"error.type": failure}
        cached = {} if finish is None else {"gen_ai.usage.cache_read.input_tokens": finish.cached_tokens}
        counts = _output_attributes(statistics, clock, num_tokens)
        span.end({"coppice.output_index": self._index, **counts, **cached, **end}, failed=failure in _FAULTS)


def _request_attributes(
    request: GenerationRequest, model: str, num_outputs: int
) -> dict[str, str | bool | int | float | Sequence[str]]:
    sampling = request.sampling
    known: dict[str, str | bool | int | float | Sequence[str] | None] = {
        "gen_ai.provider.name": "coppice",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.id": request.request_id,
        "gen_ai.request.stream": True,
        "gen_ai.request.choice.count": num_outputs,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k or None,
        "gen_ai.request.max_tokens": request.stopping.max_tokens,
        # Seeds are unsigned 64-bit, attributes signed.
        "gen_ai.request.seed": sampling.seed if sampling.seed < 1 << 63 else str(sampling.seed),
        "gen_ai.usage.input_tokens": len(request.prompt_ids),
        "coppice.speculates": request.speculates,
    }
    return {name: value for name, value in known.items() if value is not None}


def _output_attributes(statistics: Statistics, clock: OutputClock, num_tokens: int) -> Attributes:
    sources = {
        f"coppice.source.{name}.{what}": count
        for name, counts in statistics.sources.items()
        for what, count in (("proposed", counts.proposed), ("accepted", counts.accepted))
    }
    first = {"gen_ai.response.time_to_first_chunk": clock.ttft_ms / 1000} if clock.ttft_ms else {}
    return {
        "gen_ai.usage.output_tokens": num_tokens,
        **first,
        "coppice.queue_ms": clock.queue_ms,
        "coppice.rounds": statistics.rounds,
        "coppice.draft_tokens": statistics.draft_tokens,
        "coppice.accepted_tokens": statistics.accepted_tokens,
        "coppice.stale_drafts": statistics.stale_drafts,
        "coppice.near_ties": statistics.near_ties,
        "coppice.forward_ms": statistics.forward_us / 1000,
        "coppice.linger_ms": statistics.linger_us / 1000,
        **sources,
    }


def _round_attributes(outcome: Outcome) -> Attributes:
    return {
        "coppice.base_length": outcome.base_length,
        "coppice.tokens": len(outcome.token_ids),
        "coppice.draft_tokens": outcome.draft_nodes,
        "coppice.accepted_tokens": outcome.num_accepted,
        "coppice.pass_rows": outcome.pass_rows,
        "coppice.forward_ms": outcome.pass_us / 1000,
        "coppice.linger_ms": outcome.linger_us / 1000,
    }
