"""Rows of a load benchmark, one flat object per load and policy, and what has to be said beside them.

Speeds are medians over runs. Latencies are percentiles over all requests of all runs, not means of percentiles.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from coppice.lab.bench.load import figures
from coppice.lab.bench.load.loads import ClosedLoad, OpenLoad, PoissonLoad, StepLoad
from coppice.lab.bench.load.measure import References, Sample
from coppice.lab.bench.load.samples import Samples, lost_times, lowest_speed, settle_times, settle_tolerances, speed
from coppice.lab.bench.load.window import Answer, Fate

# A generator that is later than this with one request in a hundred measures itself.
MAX_LAG_MS = 50.0


def rows(samples: Samples, references: References) -> list[dict[str, Any]]:
    """One flat object per load and policy, in the order measured."""
    found = []
    for load in samples.loads(object):
        for policy in samples.policies:
            group = samples.of(load, policy.name)
            row = {
                "name": f"{policy.name} {load.name}",
                "policy": policy.name,
                "load": load.name,
                **_load_figures(samples, load, group),
                **_speeds("tokens_per_s", map(speed, group)),
                **_latencies(group),
                **_counts(group, references),
                "note": policy.note,
            }
            found.append(row)
    return found


def series(samples: Samples) -> list[dict[str, Any]]:
    """Tokens per second and draft nodes per round over the time of each step, by bins."""
    return [
        {
            "policy": policy.name,
            "run": sample.run,
            "bin_s": figures.BIN_S,
            "tokens_per_s": figures.token_bins(sample.answers, sample.span),
            "nodes_per_round": [_rounded(value) for value in figures.node_bins(sample.answers, sample.span)],
        }
        for load in samples.loads(StepLoad)
        for policy in samples.policies
        for sample in samples.of(load, policy.name)
    ]


def mismatches(result: Iterable[Mapping[str, Any]]) -> list[str]:
    """What breaks the promise: tokens that are not those of the same request with speculation off."""
    return [
        f"{row['name']}: {row['num_compared'] - row['num_identical']} of {row['num_compared']} outputs differ"
        for row in result
        if not row["identical"]
    ]


def remarks(result: Sequence[Mapping[str, Any]]) -> list[str]:
    """What has to be said beside the figures."""
    notes = [
        f"{row['name']}: {row['num_refused']} requests were refused and {row['num_failed']} failed."
        for row in result
        if row["num_refused"] or row["num_failed"]
    ]
    late = [row for row in result if (row["lag_ms_p99"] or 0) > MAX_LAG_MS]
    return notes + [
        f"{row['name']}: the load generator itself was late by up to {row['lag_ms_p99']:.0f} ms (p99); that is in "
        "the latencies."
        for row in late
    ]


def is_identical(answer: Answer, references: References) -> bool:
    """Whether what came is what speculation off gives, and all of it where the request was completed."""
    expected = references[answer.request.prompt][: answer.request.task.max_tokens]
    if answer.fate is Fate.COMPLETED:
        return answer.token_ids == expected
    return answer.token_ids == expected[: len(answer.token_ids)]


def _load_figures(samples: Samples, load: ClosedLoad | OpenLoad | StepLoad, group: Sequence[Sample]) -> dict[str, Any]:
    if isinstance(load, ClosedLoad):
        warm_up_s = statistics.median(sample.span.start_s for sample in group)
        return {"part": "closed", "concurrency": load.concurrency, "warm_up_s": _rounded(warm_up_s)}
    if isinstance(load, StepLoad):
        return {
            "part": "step",
            "concurrency": load.concurrency,
            **_step_figures(load, group, settle_tolerances(samples, load)),
        }
    offered = [len(sample.answers) for sample in group]
    good = [figures.num_good(sample.answers, samples.targets) for sample in group]
    return {
        "part": "open",
        "rate": load.rate if isinstance(load, PoissonLoad) else None,
        "offered_per_s": _rounded(statistics.median(offered) / load.duration_s),
        **_speeds("goodput_per_s", (number / load.duration_s for number in good)),
        "good_share": _rounded(_share(sum(good), sum(offered))),
    }


def _step_figures(load: StepLoad, group: Sequence[Sample], tolerances: Sequence[float]) -> dict[str, Any]:
    """Speeds and settle times of the levels, and what their beginnings cost, medians over runs.

    None where half of the runs or more never settled, or gave nothing in the second half.
    """
    found: dict[str, Any] = {}
    for level, name in zip(load.levels, ("before", "at", "after"), strict=True):
        speeds = [figures.tokens_per_s(sample.answers, level.span) for sample in group]
        found[f"tokens_per_s_{name}"] = _rounded(statistics.median(speeds))
    for number, name in ((1, "up"), (2, "down")):
        settled = [settle_times(load, sample, tolerances)[number] for sample in group]
        found[f"settle_{name}_s"] = _median_or_never(settled)
        found[f"settle_tolerance_{name}"] = _rounded(tolerances[number])
        found[f"lost_{name}_s"] = _median_or_never([lost_times(load, sample)[number] for sample in group])
    found["lowest_tokens_per_s_at"] = _rounded(statistics.median(lowest_speed(load, sample) for sample in group))
    return found


def _median_or_never(times: Sequence[float | None]) -> float | None:
    ordered = sorted(times, key=lambda time: float("inf") if time is None else time)
    return _rounded(ordered[len(ordered) // 2])


def _latencies(group: Sequence[Sample]) -> dict[str, Any]:
    """Percentiles over the events of all runs, milliseconds, and what rounds were like."""
    ended = [answer for sample in group for answer in figures.completed(sample.answers, sample.span)]
    gaps = [gap for sample in group for gap in figures.gaps_s(sample.answers, sample.span)]
    deltas = [delta for answer in ended for delta in answer.deltas]
    return {
        **_percentiles("ttft", [time for sample in group for time in figures.ttfts_s(sample.answers, sample.span)]),
        **_percentiles("itl", gaps),
        **_percentiles("tpot", figures.tpots_s(ended)),
        **_percentiles("e2e", [answer.ended_s - answer.intended_s for answer in ended]),
        "lag_ms_p99": _ms(figures.percentile((one.sent_s - one.intended_s for one in _all(group)), 99)),
        "tokens_per_delta": _rounded(_share(sum(delta.num_tokens for delta in deltas), len(deltas))),
        "rows_per_pass": _rounded(figures.rows_per_pass(ended)),
        "mean_acceptance_length": _rounded(figures.mean_acceptance_length(ended)),
        "nodes_per_round": _rounded(figures.nodes_per_round(ended)),
    }


def _counts(group: Sequence[Sample], references: References) -> dict[str, Any]:
    answers = _all(group)
    fates = Counter(answer.fate for answer in answers)
    compared = [answer for answer in answers if answer.token_ids or answer.fate is Fate.COMPLETED]
    num_identical = sum(is_identical(answer, references) for answer in compared)
    return {
        "num_requests": len(answers),
        **{f"num_{fate.value}": fates[fate] for fate in Fate},
        "num_compared": len(compared),
        "num_identical": num_identical,
        "identical": num_identical == len(compared),
    }


def _all(group: Iterable[Sample]) -> list[Answer]:
    return [answer for sample in group for answer in sample.answers]


def _speeds(name: str, values: Iterable[float]) -> dict[str, float]:
    taken = list(values)
    return {
        name: round(statistics.median(taken), 3),
        f"{name}_min": round(min(taken), 3),
        f"{name}_max": round(max(taken), 3),
    }


def _percentiles(name: str, times_s: Sequence[float]) -> dict[str, float | None]:
    return {f"{name}_ms_p{percent}": _ms(figures.percentile(times_s, percent)) for percent in (50, 99)}


def _ms(time_s: float | None) -> float | None:
    return None if time_s is None else round(1000 * time_s, 3)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _share(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None
