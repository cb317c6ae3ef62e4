"""Latency histograms over all outputs, in seconds; named and defined as in vLLM."""

from __future__ import annotations

from prometheus_client import Histogram

from coppice.obs.metrics import histogram

# Buckets in seconds: from the round of a fast local drafter, and up to a wait for the longest deadline.
GAPS = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5, 5.0)
WAITS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 600.0)


class Latencies:
    """One observation per output; `between_tokens` has one per round but the first."""

    def __init__(self) -> None:
        self.to_first_token = histogram(
            "coppice_orchestrator_time_to_first_token_seconds",
            "Time from a request's arrival to an output's first token.",
            WAITS,
        )
        # Regardless of the number of tokens in a round.
        self.between_tokens = histogram(
            "coppice_orchestrator_inter_token_latency_seconds", "Time from a round's tokens to the next round's.", GAPS
        )
        self.per_token = histogram(
            "coppice_orchestrator_request_time_per_output_token_seconds",
            "Mean time per token after an output's first.",
            GAPS,
        )
        self.to_end = histogram(
            "coppice_orchestrator_e2e_request_latency_seconds",
            "Time from a request's arrival to an output's end.",
            WAITS,
        )
        self.in_queues = histogram(
            "coppice_orchestrator_request_queue_time_seconds", "Time in queues of an output.", WAITS
        )

    @property
    def all(self) -> tuple[Histogram, ...]:
        """All histograms, in order of export."""
        return self.to_first_token, self.between_tokens, self.per_token, self.to_end, self.in_queues

    def output_ended(self, num_tokens: int, queue_ms: float, ttft_ms: float, total_ms: float) -> None:
        """Observe the end of an output."""
        self.to_end.observe(total_ms / 1000)
        self.in_queues.observe(queue_ms / 1000)
        if num_tokens > 1:
            self.per_token.observe((total_ms - ttft_ms) / 1000 / (num_tokens - 1))
