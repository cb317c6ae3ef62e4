"""What is counted of requests outlives them, and is the same while they run and when they have ended."""

from __future__ import annotations

import pytest
from prometheus_client import Histogram

from orchestrator.request.latencies import Latencies
from orchestrator.request.statistics import OutputClock, SourceTotals, Statistics
from tests.metrics import values


def some(scale: int) -> Statistics:
    return Statistics(
        rounds=scale,
        draft_tokens=2 * scale,
        accepted_tokens=3 * scale,
        redraft_tokens=4 * scale,
        stale_drafts=5 * scale,
        near_ties=6 * scale,
        sources={"a": SourceTotals(scale, 1)},
        rounds_drafted_by_depth=[scale] * scale,
        rounds_accepted_by_depth=[scale],
        linger_us=7 * scale,
    )


def test_statistics_add_up_by_depth_and_source() -> None:
    total = some(1)
    total.add(some(3))
    total.add(Statistics(sources={"b": SourceTotals(2, 2)}))
    assert total == Statistics(
        rounds=4,
        draft_tokens=8,
        accepted_tokens=12,
        redraft_tokens=16,
        stale_drafts=20,
        near_ties=24,
        sources={"a": SourceTotals(4, 2), "b": SourceTotals(2, 2)},
        rounds_drafted_by_depth=[4, 3, 3],
        rounds_accepted_by_depth=[4],
        linger_us=28,
    )


def test_the_sum_shares_nothing_with_what_was_added() -> None:
    one, total = some(2), Statistics()
    total.add(one)
    total.add(some(1))
    assert one == some(2)


def counted(histogram: Histogram) -> tuple[float, float]:
    """How many values, and their sum."""
    [name] = [metric.name for metric in histogram.collect()]
    found = values(histogram.collect())
    return found[f"{name}_count"], found[f"{name}_sum"]


def test_a_clock_tells_the_first_token_once_and_then_every_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 10.0
    monkeypatch.setattr("orchestrator.request.statistics.time.monotonic", lambda: now_s)
    latencies = Latencies()
    clock, silent = OutputClock(9.0, latencies=latencies), OutputClock(9.0)
    for now_s in (10.0, 10.25, 10.75):  # noqa: B007
        clock.tokens_came()
        silent.tokens_came()
    assert counted(latencies.to_first_token) == (1, 1.0)
    assert counted(latencies.between_tokens) == (2, 0.75)
    assert clock.ttft_ms == silent.ttft_ms == 1000.0


def test_an_output_of_one_token_has_no_time_per_token() -> None:
    latencies = Latencies()
    latencies.output_ended(1, queue_ms=5, ttft_ms=100, total_ms=100)
    latencies.output_ended(11, queue_ms=5, ttft_ms=100, total_ms=600)
    assert counted(latencies.per_token) == (1, 0.05)
    assert counted(latencies.to_end) == (2, 0.7)
    assert counted(latencies.in_queues) == (2, 0.01)
