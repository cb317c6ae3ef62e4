"""Rows of an overload benchmark, one flat object per load, its named ratios, and what must not be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from coppice.lab.bench.load.figures import Targets, num_good, percentile
from coppice.lab.bench.load.measure import References
from coppice.lab.bench.load.rows import MAX_LAG_MS, is_identical
from coppice.lab.bench.load.window import Answer, Fate
from coppice.lab.bench.overload import figures
from coppice.lab.bench.overload.first_tokens import slowest
from coppice.lab.bench.overload.measure import CALM, OverloadSample

RATIO_NOTE = (
    "p99.xF: latency per token (request latency from the intended arrival / output tokens) of accepted requests at F "
    "times saturation at the 99th percentile, over that at 0.7 times; .ttft, .tpot, .e2e: the same of time to first "
    "token, inter-token latency and request latency; percentiles over all runs, beside them the least and most of one "
    "run; recovery_s.xF: seconds after the overload until five requests in a row that get in, of ten that come at "
    "most, are served within the 99th percentiles of 0.7, the longest of the runs; goodput.xF: goodput over that at 0.7"
)
PERCENTS = (50, 90, 99)


def rows(samples: Sequence[OverloadSample], targets: Targets, references: References) -> list[dict[str, Any]]:
    """One flat object per load, the calm one first."""
    return [_row(group, targets, references) for group in _groups(samples)]


def ratios(samples: Sequence[OverloadSample], targets: Targets) -> tuple[dict[str, float], dict[str, list[float]]]:
    """The named ratios, and the smallest and largest value of each over the runs."""
    values, spread = (
        _ratios(samples, targets),
        [
            _ratios([sample for sample in samples if sample.run == run], targets)
            for run in sorted({sample.run for sample in samples})
        ],
    )
    by_run = {name: [one[name] for one in spread if name in one] for name in values}
    return values, {name: [min(found), max(found)] for name, found in by_run.items() if found}


def problems(result: Sequence[dict[str, Any]]) -> list[str]:
    """What no overload excuses: other tokens, other errors, refusals that do not say when to come again."""
    found = []
    for row in result:
        if differ := row["num_compared"] - row["num_identical"]:
            found.append(f"{row['name']}: {differ} of {row['num_compared']} outputs differ")
        if row["num_failed"]:
            found.append(f"{row['name']}: {row['num_failed']} requests failed: {row['first_error']}")
        if row["num_refused_without_delay"]:
            found.append(f"{row['name']}: {row['num_refused_without_delay']} refusals had no RetryInfo")
    return found


def remarks(result: Sequence[dict[str, Any]]) -> list[str]:
    """What has to be said beside the figures."""
    late = [row for row in result if (row["lag_ms_p99"] or 0) > MAX_LAG_MS]
    cut = [row for row in result if row["num_cut"]]
    return [
        f"{row['name']}: the load generator itself was {row['lag_ms_p99']:.0f} ms late (p99); latencies contain that."
        for row in late
    ] + [f"{row['name']}: {row['num_cut']} requests had not ended a minute after the last arrival." for row in cut]


def slowest_first_tokens(samples: Sequence[OverloadSample]) -> list[dict[str, Any]]:
    """Of every load, the calm one first."""
    return [one for group in _groups(samples) for one in slowest(group)]


def _row(group: list[OverloadSample], targets: Targets, references: References) -> dict[str, Any]:
    during = [answer for sample in group for answer in sample.during]
    length_s = sum(sample.end_s for sample in group)
    taken = figures.accepted(group)
    good = num_good(during, targets)
    tokens = sum(delta.num_tokens for sample in group for one in sample.during for delta in one.deltas)
    return {
        "name": f"x{group[0].factor:g}",
        "factor": group[0].factor,
        "offered_per_s": round(len(during) / length_s, 3),
        "completed_per_s": round(len([one for one in during if one.fate is Fate.COMPLETED]) / length_s, 3),
        "tokens_per_s": round(tokens / length_s, 3),
        "goodput_per_s": round(good / length_s, 3),
        "num_measured": len(taken),
        **{
            f"{name}_ms_p{percent}": _ms(figures.latency(taken, name, percent))
            for name in figures.LATENCIES
            for percent in PERCENTS
        },
        "lag_ms_p99": _ms(percentile((one.sent_s - one.intended_s for one in during), 99)),
        "most_waiting": max((crowd.num_waiting for sample in group for crowd in sample.crowds), default=None),
        "most_running": max((crowd.num_running for sample in group for crowd in sample.crowds), default=None),
        **_counts([answer for sample in group for answer in sample.answers], references),
    }


def _counts(answers: Sequence[Answer], references: References) -> dict[str, Any]:
    """Of all requests, those after an overload too."""
    fates = Counter(answer.fate for answer in answers)
    refused = [answer for answer in answers if answer.fate is Fate.REFUSED]
    compared = [answer for answer in answers if answer.token_ids or answer.fate is Fate.COMPLETED]
    return {
        "num_requests": len(answers),
        **{f"num_{fate.value}": fates[fate] for fate in Fate},
        "num_refused_without_delay": sum(not figures.is_polite(answer) for answer in refused),
        "first_error": next((answer.error for answer in answers if answer.fate is Fate.FAILED), ""),
        "num_compared": len(compared),
        "num_identical": sum(is_identical(answer, references) for answer in compared),
    }


def _ratios(samples: Sequence[OverloadSample], targets: Targets) -> dict[str, float]:
    calm, *loaded = _groups(samples)
    found: dict[str, float] = {}
    for group in loaded:
        name = f"x{group[0].factor:g}"
        for kind in figures.LATENCIES:
            suffix = "" if kind == "token" else f".{kind}"
            for percent in (50, 99):
                mine, theirs = (figures.latency(figures.accepted(one), kind, percent) for one in (group, calm))
                if mine is not None and theirs:
                    found[f"overload.p{percent}.{name}/x{CALM:g}{suffix}"] = round(mine / theirs, 4)
        found[f"overload.recovery_s.{name}"] = round(max(_recoveries(group, calm)), 3)
        if calm_good := _goodput(calm, targets):
            found[f"overload.goodput.{name}/x{CALM:g}"] = round(_goodput(group, targets) / calm_good, 4)
    return found


def _recoveries(group: list[OverloadSample], calm: list[OverloadSample]) -> list[float]:
    """By run; one that never recovers counts as long as it was looked at."""
    reference = figures.accepted(calm)
    times = [figures.recovery_s(sample, reference) for sample in group]
    return [
        max((one.intended_s - sample.end_s for one in sample.after), default=0.0) if time is None else time
        for sample, time in zip(group, times, strict=True)
    ]


def _goodput(group: list[OverloadSample], targets: Targets) -> float:
    return sum(num_good(sample.during, targets) for sample in group) / sum(sample.end_s for sample in group)


def _groups(samples: Sequence[OverloadSample]) -> list[list[OverloadSample]]:
    """By load in the order measured, the calm one first."""
    factors = dict.fromkeys(sample.factor for sample in samples)
    return [[sample for sample in samples if sample.factor == factor] for factor in factors]


def _ms(time_s: float | None) -> float | None:
    return None if time_s is None else round(1000 * time_s, 3)
