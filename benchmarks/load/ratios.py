"""Named ratios of a load benchmark: each within a run, then the median over runs, and how far runs differ."""

from __future__ import annotations

import operator
import statistics
from collections.abc import Callable
from functools import partial

from benchmarks.load import figures
from benchmarks.load.loads import ClosedLoad, Load, PoissonLoad, StepLoad, TraceLoad
from benchmarks.load.measure import Sample
from benchmarks.load.policies import FIXED, OFF, PLANNER
from benchmarks.load.samples import Samples, lost_times, lowest_speed, settle_times, speed

RATIO_NOTE = (
    "median over runs of the ratio within a run; .cN: tokens/s with N requests at once, .min: the least of these; "
    "off/transformers: over the better of transformers' batched generate and its continuous batching, one batch of as "
    "many requests; best-fixed: the fixed budget whose median is best there; .goodput.rF: goodput at F times the "
    "requests/s that saturate the server without speculation; step.settle_s: seconds until the planner's bins "
    "of 250 ms stay within 15 % of their level's median, after the slower of both steps, a level's length where they "
    "never do; step.settle_1s_s: the same of running means over 1 s; step.lost_s: what the planner loses at the "
    "beginning of a level, in seconds of the level's lasting speed, at the dearer of both steps; "
    "step.lost_beyond_off_s: less what speculation off loses there; step.lowest/off: the fewest tokens/s over 2 s of "
    "many requests at once, over off's"
)

# By name, a value for each run.
ByRun = dict[str, list[float]]


def ratios(samples: Samples, beside: ByRun | None = None) -> tuple[dict[str, float], dict[str, list[float]]]:
    """The named ratios, those measured `beside` too, and the smallest and largest value of each over the runs."""
    closed = {name: _within_runs(samples, *terms, speed) for name, terms in _closed_terms(samples).items()}
    by_run = {**_with_least({**closed, **(beside or {})}), **_open_ratios(samples), **_step_ratios(samples)}
    measured = {name: values for name, values in by_run.items() if values}
    middle = {name: round(statistics.median(values), 4) for name, values in measured.items()}
    return middle, {name: [round(min(v), 4), round(max(v), 4)] for name, v in measured.items()}


def _closed_terms(samples: Samples) -> dict[str, tuple[ClosedLoad, str, str]]:
    """For each ratio of speeds: the load, whose speed, and over whose."""
    terms = {}
    for load in samples.loads(ClosedLoad):
        for policy in samples.policies:
            if policy.name != OFF:
                terms[f"{policy.name}/{OFF}.{load.name}"] = (load, policy.name, OFF)
        medians = {name: statistics.median(map(speed, samples.of(load, name))) for name in FIXED}
        best = max(medians, key=medians.__getitem__)
        terms[f"{PLANNER}/best-fixed.{load.name}"] = (load, PLANNER, best)
    return terms


def _with_least(by_run: ByRun) -> ByRun:
    """Each ratio under `.min` as well, as it is where its median over runs is least."""
    least: ByRun = {}
    for name, values in by_run.items():
        key = f"{name.rpartition('.')[0]}.min"
        if values and (key not in least or statistics.median(values) < statistics.median(least[key])):
            least[key] = values
    return {**by_run, **least}


def _open_ratios(samples: Samples) -> ByRun:
    def num_good(sample: Sample) -> float:
        return figures.num_good(sample.answers, samples.targets)

    # Arrivals take the same time under every policy.
    return {
        f"{policy.name}/{OFF}.goodput.{load.name}": _within_runs(samples, load, policy.name, OFF, num_good)
        for load in samples.loads(PoissonLoad, TraceLoad)
        for policy in samples.policies
        if policy.name != OFF
    }


def _step_ratios(samples: Samples) -> ByRun:
    """Of the planner: settle times, what the steps cost, and the lowest speed; of both steps the slower or dearer."""
    widths = {"step.settle_s": 1, "step.settle_1s_s": figures.SMOOTHED_BINS}
    found: ByRun = {}
    for load in samples.loads(StepLoad):
        planner, off = samples.of(load, PLANNER), samples.of(load, OFF)
        for name, width in widths.items():
            found[name] = [_slower_step(load, sample, width) for sample in planner]
        lost = [(_lost(load, mine), _lost(load, theirs)) for mine, theirs in zip(planner, off, strict=True)]
        found["step.lost_s"] = [max(mine) for mine, _ in lost]
        found["step.lost_beyond_off_s"] = [max(map(operator.sub, mine, theirs)) for mine, theirs in lost]
        found[f"step.lowest/{OFF}"] = _within_runs(samples, load, PLANNER, OFF, partial(lowest_speed, load))
    return found


def _lost(load: StepLoad, sample: Sample) -> list[float]:
    """By the step up and the step down, the first half of the level where nothing comes in the second."""
    pairs = zip(lost_times(load, sample)[1:], load.levels[1:], strict=True)
    return [level.span.length_s / 2 if time is None else time for time, level in pairs]


def _slower_step(load: StepLoad, sample: Sample, width: int) -> float:
    pairs = zip(settle_times(load, sample, width)[1:], load.levels[1:], strict=True)
    return max(level.span.length_s if time is None else time for time, level in pairs)


def _within_runs(
    samples: Samples, load: Load, first: str, second: str, figure: Callable[[Sample], float]
) -> list[float]:
    """The ratio of a figure of two policies in each run; none of runs that have nothing to divide by."""
    pairs = zip(samples.of(load, first), samples.of(load, second), strict=True)
    values = [(figure(mine), figure(theirs)) for mine, theirs in pairs]
    return [mine / theirs for mine, theirs in values if theirs]
