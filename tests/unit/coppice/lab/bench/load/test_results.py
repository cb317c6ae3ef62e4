"""Rows and ratios of samples that were made by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from coppice.lab.bench.client import Answer, Fate, Task
from coppice.lab.bench.client import Batch as Answers
from coppice.lab.bench.harness.experiment import Samples
from coppice.lab.bench.harness.report import unequal
from coppice.lab.bench.load.figures import Span, Targets
from coppice.lab.bench.load.loads import ClosedLoad, Load, PoissonLoad, StepLoad, Workload
from coppice.lab.bench.load.suite import (
    Baselines,
    Results,
    Sample,
    failures,
    load_ratios,
    load_remarks,
    load_rows,
    policies,
    saturating_load,
    saturation,
    series,
)
from tests.unit.coppice.lab.bench.made_up import answer

POLICIES = policies(20)
TARGETS = Targets(ttft_s=1.0, tpot_s=0.1)
REFERENCES = ((7,) * 400,)


def _closed(concurrency: int, speeds: dict[str, Sequence[int]]) -> list[Sample]:
    """Windows of a second with so many tokens each, by policy and run."""
    load = ClosedLoad(concurrency, 1.0)
    return [
        Sample(load, name, run, Span(0.0, 1.0), (answer([(0.5, tokens)]),))
        for name, by_run in speeds.items()
        for run, tokens in enumerate(by_run)
    ]


def _everywhere(load: Load, span: Span, by_policy: dict[str, Sequence[Answer]]) -> list[Sample]:
    return [Sample(load, policy.name, 0, span, tuple(by_policy[policy.name])) for policy in POLICIES]


def test_ratios_are_medians_within_runs_and_the_least_over_concurrencies() -> None:
    two = _closed(2, {"off": [10, 20], "fixed-small": [20, 20], "fixed-large": [10, 40], "planner": [30, 40]})
    eight = _closed(8, {"off": [40, 50], "fixed-small": [50, 60], "fixed-large": [30, 30], "planner": [40, 60]})
    samples = Results(Samples(two + eight), POLICIES, TARGETS)
    found = load_ratios(samples)
    values, spread = found.values, found.spread
    assert values["planner/off.c2"] == 2.5
    assert spread["planner/off.c2"] == [2.0, 3.0]
    assert values["fixed-small/off.c2"] == 1.5
    # The large budget is the better one with two requests, by its median of 25, and the small one with eight.
    assert values["planner/best-fixed.c2"] == 2.0
    assert spread["planner/best-fixed.c2"] == [1.0, 3.0]
    assert values["planner/best-fixed.c8"] == 0.9
    assert values["planner/off.min"] == values["planner/off.c8"] == 1.1
    assert values["planner/best-fixed.min"] == 0.9
    assert spread["planner/best-fixed.min"] == [0.8, 1.0]
    assert (saturating_load(samples).concurrency, saturation(samples)) == (8, 45)


def test_a_closed_row_has_the_median_speed_and_percentiles_over_all_runs() -> None:
    load, span = ClosedLoad(2, 4.0), Span(1.0, 5.0)
    first = answer([(1.5, 2), (2.0, 6)], intended_s=1.0, rounds=2, draft_tokens=6, passes=[(8, 2)])
    second = answer([(1.3, 1), (2.3, 3)], intended_s=1.2, rounds=2, draft_tokens=2, passes=[(6, 2)])
    cut = answer([(4.0, 4)], Fate.CUT, intended_s=3.7, max_tokens=9)
    runs = [(first,), (second,), (second, cut)]
    taken = [Sample(load, policy.name, run, span, answers) for policy in POLICIES for run, answers in enumerate(runs)]
    row = load_rows(Results(Samples(taken), POLICIES, TARGETS), REFERENCES)[3]
    assert (row["name"], row["policy"], row["part"], row["concurrency"]) == ("planner c2", "planner", "closed", 2)
    assert (row["tokens_per_s"], row["tokens_per_s_min"], row["tokens_per_s_max"]) == (2.0, 1.0, 2.0)
    # 500, 100, 100 and 300 milliseconds.
    assert (row["ttft_ms_p50"], row["ttft_ms_p99"]) == (200.0, pytest.approx(494.0))
    assert row["itl_ms_p50"] == 1000.0
    assert row["tpot_ms_p50"] == pytest.approx(1000 / 3, abs=0.001)
    assert row["tokens_per_delta"] == round(16 / 6, 3)
    assert (row["rows_per_pass"], row["mean_acceptance_length"]) == (round(40 / 6, 3), round(16 / 6, 3))
    assert row["nodes_per_round"] == round(10 / 6, 3)
    assert (row["num_requests"], row["num_completed"], row["num_cut"]) == (4, 3, 1)
    assert row["identical"]


def test_open_rows_count_what_was_refused_and_what_was_good_of_all_that_was_offered() -> None:
    load, span = PoissonLoad(0.6, 3.0, 2.0, seed=0), Span(0.0, 4.0)
    good, bad = answer([(0.5, 1), (0.6, 3)]), answer([(3.0, 2)])
    refused, failed = answer([], Fate.REFUSED), answer([], Fate.FAILED)
    by_policy = {
        "off": [good, bad, bad, refused],
        "fixed-small": [bad, bad, bad, bad],
        "fixed-large": [good, good, failed, failed],
        "planner": [good, good, good, bad],
    }
    samples = Results(Samples(_everywhere(load, span, by_policy)), POLICIES, TARGETS)
    result = load_rows(samples, REFERENCES)
    assert [row["goodput_per_s"] for row in result] == [0.5, 0.0, 1.0, 1.5]
    assert [row["good_share"] for row in result] == [0.25, 0.0, 0.5, 0.75]
    assert [(row["rate"], row["offered_per_s"]) for row in result] == [(0.6, 2.0)] * 4
    assert [(row["num_refused"], row["num_failed"]) for row in result] == [(1, 0), (0, 0), (0, 2), (0, 0)]
    assert load_remarks(result) == [
        "off r0.6: 1 requests were refused and 0 failed.",
        "fixed-large r0.6: 0 requests were refused and 2 failed.",
    ]
    assert load_ratios(samples).values == {
        "fixed-small/off.goodput.r0.6": 0.0,
        "fixed-large/off.goodput.r0.6": 2.0,
        "planner/off.goodput.r0.6": 3.0,
    }


def test_a_step_has_speeds_settle_times_and_nodes_over_time() -> None:
    load = StepLoad(4, 2.0)
    # Bins of 250 ms: eight for the first and the last level, sixteen for the one between; tokens come in the middle.
    tokens = [10] * 8 + [2, 20] + [40] * 14 + [10, 10, 10, 10, 10, 10, 10, 14]
    given = answer([(0.125 + 0.25 * index, count) for index, count in enumerate(tokens)], draft_tokens=64)
    samples = Results(
        Samples(_everywhere(load, Span(0.0, 8.0), {policy.name: [given] for policy in POLICIES})), POLICIES, TARGETS
    )
    row = load_rows(samples, ((7,) * 1000,))[3]
    assert [row[f"tokens_per_s_{name}"] for name in ("before", "at", "after")] == [40.0, 145.5, 42.0]
    # The second that begins with the second bin has 140 of 160 tokens/s.
    assert (row["settle_up_s"], row["settle_down_s"]) == (0.25, 0.0)
    # In the middle level, the first eight bins lack 58 of 320 tokens; in the last one, the first four lack 4 of 44.
    assert (row["lost_up_s"], row["lost_down_s"]) == (0.363, 0.091)
    assert row["lowest_tokens_per_s_at"] == 131.0
    assert load_ratios(samples).values == {
        "step.settle_up_s": 0.25,
        "step.settle_down_s": 0.0,
        "step.settle_s": 0.25,
        "step.settle_up_s.off": 0.25,
        "step.settle_down_s.off": 0.0,
        "step.settle_s.off": 0.25,
        "step.settle_beyond_off_s": 0.0,
        "step.lost_s": 0.3625,
        "step.lost_beyond_off_s": 0.0,
        "step.lowest/off": 1.0,
    }
    [item] = [item for item in series(samples) if item["policy"] == "planner"]
    assert item["tokens_per_s"] == [4.0 * count for count in tokens]
    assert item["nodes_per_round"] == [2.0] * 32


@pytest.mark.parametrize(("swing", "settles"), [(0.2, True), (0.4, False)])
def test_what_speculation_off_strays_by_is_no_unrest_and_more_is(swing: float, settles: bool) -> None:
    load = StepLoad(4, 4.0)

    def swinging(by: float) -> Answer:
        fast, slow = [round(100 * (1 + sign * by)) for sign in (1, -1)]
        return _given([100] * 16 + ([fast] * 4 + [slow] * 4) * 4 + [100] * 16)

    by_policy: dict[str, Sequence[Answer]] = {policy.name: [swinging(swing)] for policy in POLICIES}
    by_policy["off"] = [swinging(0.25)]
    samples = Results(Samples(_everywhere(load, Span(0.0, 16.0), by_policy)), POLICIES, TARGETS)
    found = load_ratios(samples).values
    assert found["step.settle_up_s"] == (0.0 if settles else 8.0)
    assert found["step.settle_up_s.off"] == 0.0
    row = load_rows(samples, ((7,) * 10_000,))[3]
    assert (row["settle_tolerance_up"], row["settle_tolerance_down"]) == (0.25, 0.15)


def _given(tokens: Sequence[int]) -> Answer:
    """An answer with so many tokens in the middle of each bin of 250 ms."""
    return answer([(0.125 + 0.25 * index, count) for index, count in enumerate(tokens)])


class Batch:
    """Gives every task so many tokens in so many seconds, by run."""

    note = "made up"

    def __init__(self, name: str, *seconds: float) -> None:
        self.name = name
        self._seconds = iter((1.0, seconds[0], *[time for later in seconds[1:] for time in (1.0, later)]))

    async def complete(self, tasks: Sequence[Task]) -> Answers:
        # Before each run there is a warm-up of a second.
        ended_s = next(self._seconds)
        return Answers(tuple(answer([(ended_s, task.max_tokens)]) for task in tasks))


async def test_plain_decoding_is_compared_with_the_better_of_transformers_ways_in_each_run() -> None:
    load = ClosedLoad(2, 1.0)
    baselines = Baselines([Batch("batched", 0.5, 2.0), Batch("continuous", 1.0, 1.0)], Workload(((1,),), 10, 10))
    for run in range(2):
        await baselines.measure(load, run)
        await baselines.measure(StepLoad(2, 1.0), run)
    taken = _closed(2, {policy.name: [80, 60] for policy in POLICIES})
    beside = baselines.ratios(Results(Samples(taken), POLICIES, TARGETS))
    # 20 tokens in half a second and in two, and in one second each time.
    assert beside == {"off/batched.c2": [2.0, 6.0], "off/continuous.c2": [4.0, 3.0], "off/transformers.c2": [2.0, 3.0]}
    found = load_ratios(Results(Samples(taken), POLICIES, TARGETS), beside)
    values, spread = found.values, found.spread
    assert (values["off/transformers.c2"], spread["off/transformers.c2"]) == (2.5, [2.0, 3.0])
    assert values["off/transformers.min"] == 2.5
    row = baselines.rows(REFERENCES)[0]
    assert (row["name"], row["part"], row["tokens_per_s"]) == ("batched c2", "baseline", 25.0)
    assert (row["num_requests"], row["num_identical_to_off"]) == (4, 4)
    assert baselines.rows(((8,) * 10,))[0]["num_identical_to_off"] == 0


@pytest.mark.parametrize(
    ("given", "num_compared", "num_identical"),
    [
        (answer([(0.5, 3)]), 1, 1),
        (answer([(0.5, 3)], Fate.CUT, max_tokens=9), 1, 1),
        (answer([(0.5, 3)], token=8), 1, 0),
        (answer([(0.5, 3)], Fate.CUT, max_tokens=9, token=8), 1, 0),
        (answer([(0.5, 3)], Fate.FAILED, max_tokens=9, token=8), 1, 0),
        # Completed, and yet too short or too long.
        (answer([(0.5, 3)], max_tokens=4), 1, 0),
        (answer([(0.5, 3)], max_tokens=2), 1, 0),
        (answer([], max_tokens=2), 1, 0),
        (answer([], Fate.REFUSED), 0, 0),
    ],
)
def test_every_token_that_came_is_compared(given: Answer, num_compared: int, num_identical: int) -> None:
    load = ClosedLoad(1, 1.0)
    by_policy = {policy.name: [answer([(0.5, 3)])] for policy in POLICIES} | {"planner": [given]}
    result = load_rows(Results(Samples(_everywhere(load, Span(0.0, 1.0), by_policy)), POLICIES, TARGETS), REFERENCES)
    assert (result[3]["num_compared"], result[3]["num_identical"]) == (num_compared, num_identical)
    expected = [] if num_identical == num_compared else ["planner c1: 1 of 1 outputs differ"]
    assert unequal(result, "num_compared") == expected


def test_a_failed_request_is_told_with_its_error_and_a_refused_one_is_not() -> None:
    load = PoissonLoad(0.5, 1.0, 1.0, 0)
    answers = {policy.name: [answer([(0.5, 3)]), answer([], Fate.REFUSED)] for policy in POLICIES}
    assert failures(Results(Samples(_everywhere(load, Span(0.0, 1.0), answers)), POLICIES)) == []
    answers["planner"].append(answer([], Fate.FAILED))
    found = failures(Results(Samples(_everywhere(load, Span(0.0, 1.0), answers)), POLICIES))
    assert found == ["planner r0.5: 1 requests failed, the first: failed"]
