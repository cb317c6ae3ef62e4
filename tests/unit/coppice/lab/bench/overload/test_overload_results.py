"""Rows and ratios of overload samples that were made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coppice.completion import Timing
from coppice.lab.bench.client import Answer, Fate, Manner
from coppice.lab.bench.harness.experiment import Samples
from coppice.lab.bench.load.figures import Targets
from coppice.lab.bench.overload import (
    CALM,
    PARTS,
    OverloadSample,
    by_load,
    overload_ratios,
    overload_remarks,
    overload_rows,
    problems,
    recovery_s,
    slowest,
)
from tests.unit.coppice.lab.bench.made_up import answer

REFERENCES = ((7,) * 400,)
TARGETS = Targets(ttft_s=1.0, tpot_s=0.2)


def served(at_s: float, ttft_s: float = 0.1, token_s: float = 0.1) -> Answer:
    """Ten tokens: one, and after nine times `token_s` the others."""
    first_s = at_s + ttft_s
    return answer([(first_s, 1), (first_s + 9 * token_s, 9)], intended_s=at_s)


def refused(at_s: float, retry_after_s: float | None = 0.5) -> Answer:
    return replace(answer([], Fate.REFUSED, intended_s=at_s), retry_after_s=retry_after_s)


def sample(factor: float, answers: list[Answer], run: int = 0, end_s: float = 10.0) -> OverloadSample:
    return OverloadSample(factor, run, end_s, tuple(answers), ((3, 0), (4, 2)))


def test_a_ratio_is_of_attentive_clients_that_came_during_the_load() -> None:
    slow = replace(served(2.0, token_s=9.0), manner=Manner(pause_s=1.0))
    gone = replace(answer([(2.5, 3)], Fate.LEFT, intended_s=2.0, max_tokens=9), manner=Manner(leave_after_s=1.0))
    after = [served(10.5 + number, token_s=5.0) for number in range(3)]
    calm = sample(CALM, [served(1.0)] * 9)
    loaded = sample(4.0, [served(1.0, 0.3, 0.15)] * 9 + [slow, gone, refused(3.0), *after])
    found = overload_ratios(Samples([calm, loaded]), TARGETS)
    values, spread = found.values, found.spread
    # 1.65 seconds for ten tokens instead of 1.0.
    assert values["overload.p99.x4/x0.7"] == pytest.approx(1.65)
    assert values["overload.p99.x4/x0.7.ttft"] == pytest.approx(3.0)
    assert values["overload.p50.x4/x0.7.tpot"] == pytest.approx(1.5)
    assert values["overload.p99.x4/x0.7.e2e"] == pytest.approx(1.65)
    assert values["overload.goodput.x4/x0.7"] == 1.0
    # Those that came after it were slow for as long as was looked.
    assert values["overload.recovery_s.x4"] == 2.5
    assert set(spread) == set(values)
    row = overload_rows(Samples([calm, loaded]), TARGETS, REFERENCES)[1]
    assert (row["name"], row["num_measured"], row["offered_per_s"]) == ("x4", 9, 1.2)
    assert (row["num_refused"], row["num_left"], row["num_completed"]) == (1, 1, 13)
    assert (row["most_waiting"], row["most_running"]) == (2, 4)
    assert row["token_ms_p99"] == 165.0
    assert problems([row]) == overload_remarks([row]) == []


def test_recovery_is_when_five_in_a_row_are_served_as_in_calm_times() -> None:
    quick = [served(12.0 + 0.5 * number) for number in range(5)]
    early = [served(10.1), refused(10.5), served(10.9), served(11.0, ttft_s=0.5), served(11.5, token_s=0.3)]
    left = replace(answer([], Fate.LEFT, intended_s=13.1), manner=Manner(leave_after_s=0.1))
    assert recovery_s(sample(4.0, [*quick, left, *early]), [served(0.0)]) == 2.0
    assert recovery_s(sample(4.0, [*early, *quick[:4]]), [served(0.0)]) is None


def test_other_errors_rude_refusals_and_other_tokens_are_problems() -> None:
    failed = replace(answer([], Fate.FAILED), error="UNAVAILABLE: gone")
    wrong = answer([(1.0, 3)], token=8)
    [row] = overload_rows(
        Samples([sample(CALM, [served(1.0), refused(1.0, None), failed, wrong])]), TARGETS, REFERENCES
    )
    assert problems([row]) == [
        "x0.7: 1 of 2 outputs differ",
        "x0.7: 1 requests failed: UNAVAILABLE: gone",
        "x0.7: 1 refusals had no RetryInfo",
    ]


def test_the_slowest_first_tokens_say_where_they_waited_and_when_they_came() -> None:
    timing = Timing(queue_ms=150.0, ttft_ms=480.0, door_ms=100.0, prompt_ms=300.0, first_pass_ms=200.0)
    slow = served(3.0, ttft_s=0.5)
    assert slow.completion is not None
    slow = replace(slow, completion=replace(slow.completion, timing=timing))
    resting = replace(served(2.0, ttft_s=9.0), manner=Manner(pause_s=1.0))
    quick = [served(1.0)] * 90
    samples = Samples([sample(CALM, quick), sample(4.0, [*quick, slow, resting]), sample(4.0, quick, run=1)])
    found = [one for group in by_load(samples) for one in slowest(group)]
    assert [(one["name"], one["ttft_ms"]) for one in found] == [("x0.7", 100.0), ("x4", 500.0), ("x4", 100.0)]
    worst = found[1]
    assert (worst["run"], worst["at_s"]) == (0, 3.0)
    waited = {part: worst[f"{part}_ms"] for part in PARTS}
    assert waited == {
        "door": 100.0,
        "before_verifier": 30.0,
        "verifier_queue": 50.0,
        "other_passes": 100.0,
        "first_pass": 200.0,
        "outside": 20.0,
    }
    assert sum(waited.values()) == worst["ttft_ms"]
