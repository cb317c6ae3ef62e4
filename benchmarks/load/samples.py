"""All samples of a load benchmark, and what rows and ratios both need of them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.load import figures
from benchmarks.load.figures import Span, Targets
from benchmarks.load.loads import ClosedLoad, Load, StepLoad
from benchmarks.load.measure import Sample
from benchmarks.load.policies import OFF, Policy


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


def level_span(load: StepLoad, sample: Sample, number: int) -> Span:
    """The part of a step's window that a level has."""
    start_s = sample.span.start_s + number * load.level_s
    return Span(start_s, start_s + load.level_s)


def settle_times(load: StepLoad, sample: Sample, width: int) -> list[float | None]:
    """Seconds after the beginning of each level until it had settled, by running means of so many bins."""
    spans = [level_span(load, sample, number) for number in range(len(load.levels))]
    bins = [figures.running_mean(figures.token_bins(sample.answers, span), width) for span in spans]
    return [figures.settle_s(values) for values in bins]
