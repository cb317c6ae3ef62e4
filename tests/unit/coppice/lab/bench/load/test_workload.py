"""The requests of a load."""

from __future__ import annotations

import statistics

from coppice.lab.bench.load.loads import Workload

WORKLOAD = Workload(((1, 2), (3,), (4, 5)), min_tokens=32, max_tokens=128, temperature=0.5, seed=10)


def test_prompts_take_turns_with_lengths_drawn_evenly_from_the_range() -> None:
    requests = [WORKLOAD.request(number) for number in range(3000)]
    assert [request.prompt for request in requests[:4]] == [0, 1, 2, 0]
    assert requests[4].prompt_ids == (3,)
    assert (requests[4].temperature, requests[4].seed) == (0.5, 11)
    lengths = [request.max_tokens for request in requests]
    assert (min(lengths), max(lengths)) == (32, 128)
    assert abs(statistics.fmean(lengths) - WORKLOAD.mean_tokens) < 3
    assert requests == [WORKLOAD.request(number) for number in range(3000)]


def test_lognormal_lengths_are_mostly_short_and_within_the_bounds() -> None:
    workload = Workload(((1,),), min_tokens=16, max_tokens=256, lognormal=True)
    lengths = [workload.request(number).max_tokens for number in range(3000)]
    assert (min(lengths), max(lengths)) == (16, 256)
    # Half of them are below the geometric mean of the bounds, and the mean above it.
    assert abs(statistics.median(lengths) - 64) < 3
    assert statistics.fmean(lengths) > 70
    assert abs(statistics.fmean(lengths) - workload.mean_tokens) < 2
