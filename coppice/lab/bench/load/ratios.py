"""Named ratios of a load benchmark: each within a run, then the median over runs, and how far runs differ."""

from __future__ import annotations

import operator
import statistics
from collections.abc import Callable, Sequence
from functools import partial

from coppice.lab.bench.load import figures
from coppice.lab.bench.load.loads import ClosedLoad, Load, PoissonLoad, StepLoad, TraceLoad
from coppice.lab.bench.load.measure import Sample
from coppice.lab.bench.load.policies import FIXED, OFF, PLANNER
from coppice.lab.bench.load.samples import Samples, lost_times, lowest_speed, settle_times, settle_tolerances, speed

RATIO_NOTE = (
    "median over runs of the ratio within a run; .cN: tokens/s with N requests at once, .min: the least of these; "
    "off/transformers: over the better of transformers' batched generate and its continuous batching, one batch of as "
    "many requests; best-fixed: the fixed budget whose median is best there; .goodput.rF: goodput at F times the "
    "requests/s that saturate the server without speculation; step.settle_up_s, step.settle_down_s: seconds from a "
    "step of the load until, for two seconds, no second differs from the level's lasting speed, that of its second "
    "half, by more than 15 % or what seconds of off's second half do; a level's length where that never comes; without "
    "a name the planner's, .off speculation off's; "
    "step.settle_s: the slower of both steps; step.settle_beyond_off_s: how much longer the planner takes than off, "
    "at the step where that is most; step.lost_s: what the planner loses at the beginning of a level, in seconds of "
    "the level's lasting speed, at the dearer of both steps; "
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
    """Of the planner beside speculation off: when levels had settled, what steps cost, the lowest speed."""
    found: ByRun = {}
    for load in samples.loads(StepLoad):
        planner, off = samples.of(load, PLANNER), samples.of(load, OFF)
        by_policy = {"": planner, f".{OFF}": off}
        far = settle_tolerances(samples, load)
        times = {whose: [_settled(load, one, far) for one in group] for whose, group in by_policy.items()}
        for whose, by_run in times.items():
            for number, name in enumerate(("up", "down")):
                found[f"step.settle_{name}_s{whose}"] = [both[number] for both in by_run]
            found[f"step.settle_s{whose}"] = [max(both) for both in by_run]
        found["step.settle_beyond_off_s"] = _beyond(times[""], times[f".{OFF}"])
        lost = [_lost(load, sample) for sample in planner]
        found["step.lost_s"] = [max(both) for both in lost]
        found["step.lost_beyond_off_s"] = _beyond(lost, [_lost(load, sample) for sample in off])
        found[f"step.lowest/{OFF}"] = _within_runs(samples, load, PLANNER, OFF, partial(lowest_speed, load))
    return found


def _beyond(mine: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> list[float]:
    """By run: how much more it is of the one than of the other, at the step where that is most."""
    return [max(map(operator.sub, one, other)) for one, other in zip(mine, theirs, strict=True)]


def _settled(load: StepLoad, sample: Sample, tolerances: Sequence[float]) -> list[float]:
    """By the step up and the step down, the level's length where it never settles."""
    pairs = zip(settle_times(load, sample, tolerances)[1:], load.levels[1:], strict=True)
    return [level.span.length_s if time is None else time for time, level in pairs]


def _lost(load: StepLoad, sample: Sample) -> list[float]:
    """By the step up and the step down, the first half of the level where nothing comes in the second."""
    pairs = zip(lost_times(load, sample)[1:], load.levels[1:], strict=True)
    return [level.span.length_s / 2 if time is None else time for time, level in pairs]


def _within_runs(
    samples: Samples, load: Load, first: str, second: str, figure: Callable[[Sample], float]
) -> list[float]:
    """The ratio of a figure of two policies in each run; none of runs that have nothing to divide by."""
    pairs = zip(samples.of(load, first), samples.of(load, second), strict=True)
    values = [(figure(mine), figure(theirs)) for mine, theirs in pairs]
    return [mine / theirs for mine, theirs in values if theirs]
