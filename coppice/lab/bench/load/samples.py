"""All samples of a load benchmark, and what rows and ratios both need of them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from coppice.lab.bench.load import figures
from coppice.lab.bench.load.figures import Targets
from coppice.lab.bench.load.loads import ClosedLoad, Load, StepLoad
from coppice.lab.bench.load.measure import Sample
from coppice.lab.bench.load.policies import OFF, Policy


class Samples:
    """All samples of a benchmark, by load and policy, runs in order."""

    def __init__(self, samples: Iterable[Sample], policies: Sequence[Policy], targets: Targets) -> None:
        self._groups: dict[tuple[Load, str], list[Sample]] = {}
        for sample in samples:
            self._groups.setdefault((sample.load, sample.policy), []).append(sample)
        self.policies = tuple(policies)
        self.targets = targets

    def of(self, load: Load, policy: str) -> list[Sample]:
        """The samples of a load under a policy."""
        return sorted(self._groups[load, policy], key=lambda sample: sample.run)

    def loads(self, *kinds: type) -> list[Any]:
        """The loads of some kinds, in the order measured."""
        return [load for load in dict.fromkeys(load for load, _ in self._groups) if isinstance(load, kinds)]


def speed(sample: Sample) -> float:
    """Tokens per second."""
    return figures.tokens_per_s(sample.answers, sample.span)


def saturating_load(samples: Samples) -> ClosedLoad:
    """Under which the server without speculation gives the most tokens per second, by the median of runs."""
    loads: list[ClosedLoad] = samples.loads(ClosedLoad)
    return max(loads, key=lambda load: statistics.median(map(speed, samples.of(load, OFF))))


def saturation(samples: Samples) -> float:
    """Tokens per second under that load, without speculation."""
    return statistics.median(map(speed, samples.of(saturating_load(samples), OFF)))


def lost_times(load: StepLoad, sample: Sample) -> list[float | None]:
    """What the beginning of each level costs, in seconds of the level's lasting speed."""
    return [figures.lost_s(figures.token_bins(sample.answers, level.span)) for level in load.levels]


def lowest_speed(load: StepLoad, sample: Sample) -> float:
    """The fewest tokens per second, over two seconds, with many requests at once."""
    bins = figures.token_bins(sample.answers, load.levels[1].span)
    return min(figures.running_mean(bins, min(len(bins), figures.COLLAPSE_BINS)))


def settle_tolerances(samples: Samples, load: StepLoad) -> list[float]:
    """How far from its lasting speed each level may be and have settled.

    With speculation off there is nothing to settle in a level's second half. How far seconds of that stray all the
    same, by prompts and by lumps of tokens, is no unrest of any policy's; by the median of runs.
    """
    off = samples.of(load, OFF)
    strays = [[figures.strays(figures.token_bins(one.answers, level.span)) for one in off] for level in load.levels]
    return [max(figures.TOLERANCE, statistics.median(each)) for each in strays]


def settle_times(load: StepLoad, sample: Sample, tolerances: Sequence[float]) -> list[float | None]:
    """Seconds after the beginning of each level until it had settled."""
    return [
        figures.settle_s(figures.token_bins(sample.answers, level.span), tolerance=tolerance)
        for level, tolerance in zip(load.levels, tolerances, strict=True)
    ]
