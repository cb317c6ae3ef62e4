"""How long clients wait, as distributions over all outputs. In seconds; names and meanings are those of vLLM."""

from __future__ import annotations

from coppice.obs.histogram import Histogram

# From a fast local drafter's round to a request that waits for a place at the longest deadline.
GAPS = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5, 5.0)
WAITS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 600.0)


class Latencies:
    """One observation per output, and of `between_tokens` one per round but the first."""

    def __init__(self) -> None:
        # From the request's arrival to the output's first token, to its end, and the part of it spent in queues.
        self.to_first_token = Histogram(WAITS)
        self.to_end = Histogram(WAITS)
        self.in_queues = Histogram(WAITS)
        # From tokens to those of the next round, however many a round has; and an output's mean per token.
        self.between_tokens = Histogram(GAPS)
        self.per_token = Histogram(GAPS)

    def output_ended(self, num_tokens: int, queue_ms: float, ttft_ms: float, total_ms: float) -> None:
        """An output has come to its end."""
        self.to_end.observe(total_ms / 1000)
        self.in_queues.observe(queue_ms / 1000)
        if num_tokens > 1:
            self.per_token.observe((total_ms - ttft_ms) / 1000 / (num_tokens - 1))
