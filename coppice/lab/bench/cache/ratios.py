"""Named ratios of a cache benchmark: each within a run, then the median over runs, and how far runs differ."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from coppice.lab.bench.cache.measure import Answer
from coppice.lab.bench.cache.phases import AGAIN, COLD, FILL, KILLED, SECOND, SHIFTED
from coppice.lab.bench.cache.rows import Samples, later_acceptance_ratio, mean_acceptance_length, median_ttft_s

# A cache that has something to say must not make τ smaller; what is below this is not noise.
LEAST_TAU_RATIO = 0.98
# Phases of which the figure named so is the worst.
WORST_OF = {"warm": (AGAIN, SHIFTED), "warm-second": (SECOND,), "fill": (FILL,), "killed": (KILLED,)}

RATIO_NOTE = (
    "median over runs of the ratio within a run, over cold requests of the same prompts; without a setting: the worst "
    "of all settings and temperatures (warm: of the phases again and shifted), for tau the least, for the median "
    "time to the first token the largest; tau: from where the first rounds of both were over, whose pass reads the "
    "prompt and waits for no draft; tau-with-first: of all rounds; failed-requests: a count over all runs"
)

# By name, a value for each run.
ByRun = dict[str, list[float]]
Figure = Callable[[Iterable[Answer]], float | None]
# Of answers to the same prompts, first those of the cold phase.
Ratio = Callable[[Sequence[Answer], Sequence[Answer]], float | None]


def ratios(samples: Samples) -> tuple[dict[str, float], dict[str, list[float]]]:
    """The named ratios, and the smallest and largest value of each over the runs."""
    by_run = {
        **_over_cold(samples, "tau", later_acceptance_ratio, min),
        **_over_cold(samples, "tau-with-first", _ratio_of(mean_acceptance_length), min),
        **_over_cold(samples, "ttft", _ratio_of(median_ttft_s), max),
    }
    values = {name: round(statistics.median(taken), 4) for name, taken in by_run.items()}
    spread = {name: [round(min(taken), 4), round(max(taken), 4)] for name, taken in by_run.items()}
    failed = [float(number) for number in _failed_by_run(samples)]
    return {**values, "failed-requests": sum(failed)}, {**spread, "failed-requests": [min(failed), max(failed)]}


def broken_rules(values: Mapping[str, float], spread: Mapping[str, Sequence[float]]) -> list[str]:
    """Where the cache has made τ smaller, in words; of the phases in which it has something to say from the start."""
    return [
        f"{name}: τ is {1 - value:.1%} below that of a cold cache ({spread[name][0]:.3f} to {spread[name][1]:.3f} x it "
        f"over the runs), more than the {1 - LEAST_TAU_RATIO:.0%} that it may be."
        for phase in (AGAIN, SHIFTED, SECOND)
        for name, value in values.items()
        if name.startswith(f"{phase}/{COLD}.tau.") and value < LEAST_TAU_RATIO
    ]


def _ratio_of(figure: Figure) -> Ratio:
    def ratio(before: Sequence[Answer], after: Sequence[Answer]) -> float | None:
        divisor, value = figure(before), figure(after)
        return value / divisor if divisor and value else None

    return ratio


def _over_cold(samples: Samples, figure_name: str, ratio: Ratio, worst: Callable[..., str]) -> ByRun:
    single: dict[str, ByRun] = {group: {} for group in WORST_OF}
    for setting, temperature, phase in samples.groups():
        for group, phases in WORST_OF.items():
            if phase in phases and (taken := _within_runs(samples, setting, temperature, phase, ratio)):
                single[group][f"{phase}/{COLD}.{figure_name}.{setting}.T{temperature:g}"] = taken
    found: ByRun = {}
    for group, by_run in single.items():
        if by_run:
            found[f"{group}/{COLD}.{figure_name}"] = by_run[
                worst(by_run, key=lambda name: statistics.median(by_run[name]))
            ]
    return {**found, **{name: taken for by_run in single.values() for name, taken in by_run.items()}}


def _within_runs(samples: Samples, setting: str, temperature: float, phase: str, ratio: Ratio) -> list[float]:
    """A phase over the run's cold phase, of prompts completed in both; none of runs without any."""
    found = []
    cold = {sample.run: sample.answers for sample in samples.of(setting, temperature, COLD)}
    for sample in samples.of(setting, temperature, phase):
        value = ratio(*_completed_in_both(cold.get(sample.run, ()), sample.answers))
        if value is not None:
            found.append(value)
    return found


def _completed_in_both(before: Sequence[Answer], after: Sequence[Answer]) -> tuple[list[Answer], list[Answer]]:
    done = [{answer.prompt for answer in answers if answer.completion} for answers in (before, after)]
    both = done[0] & done[1]
    return [one for one in before if one.prompt in both], [one for one in after if one.prompt in both]


def _failed_by_run(samples: Samples) -> list[int]:
    runs = {sample.run: 0 for sample in samples.taken}
    for sample in samples.taken:
        runs[sample.run] += sum(answer.completion is None for answer in sample.answers)
    return [*runs.values()]
