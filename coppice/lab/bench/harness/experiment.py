"""An experiment: arms take turns under every load in every run; its samples are grouped and aggregated here."""

from __future__ import annotations

import contextlib
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress

from coppice.core.errors import CoppiceError

Arm = TypeVar("Arm")
Load = TypeVar("Load")
Sample = TypeVar("Sample")

# Of an interval.
NUM_RESAMPLES = 2000
# A value for each run, by the name of a ratio.
ByRun = dict[str, list[float]]


class BenchmarkError(CoppiceError):
    """A benchmark that cannot go on: the message says why."""


@dataclass(frozen=True, slots=True)
class Turn(Generic[Arm, Load]):
    """One arm under one load in one run."""

    arm: Arm
    load: Load
    run: int


@dataclass(frozen=True, slots=True)
class Experiment(Generic[Arm, Load]):
    """Every arm under every load, `num_runs` times; `seed` shuffles the arms once.

    Arms alternate on the same load, so that all of them see the same state of the machine. The first place rotates: no
    arm always runs on the caches or the clock rate that the same predecessor left.
    """

    arms: Sequence[Arm]
    loads: Sequence[Load]
    num_runs: int
    seed: int | None = None
    # All runs of one load before the next load; otherwise all loads in every run.
    by_load: bool = False

    def turns(self) -> Iterator[Turn[Arm, Load]]:
        """In the order in which they are to be measured."""
        arms = list(self.arms)
        if self.seed is not None:
            random.Random(self.seed).shuffle(arms)
        runs, numbers = range(self.num_runs), range(len(self.loads))
        order = (
            ((run, number) for number in numbers for run in runs)
            if self.by_load
            else ((run, number) for run in runs for number in numbers)
        )
        for run, number in order:
            for arm in in_turn(arms, run + number):
                yield Turn(arm, self.loads[number], run)


class Samples(tuple[Sample, ...]):
    """Samples of an experiment, in the order measured. Fields are those of the samples; `run` is one of them."""

    __slots__ = ()

    def where(self, **fields: object) -> Samples[Sample]:
        """Those whose fields have these values."""
        return Samples(one for one in self if all(getattr(one, name) == value for name, value in fields.items()))

    def each(self, field: str) -> list[Any]:
        """The values of a field, each once, in order."""
        return list(dict.fromkeys(getattr(one, field) for one in self))

    def runs(self) -> list[Samples[Sample]]:
        return [self.where(run=run) for run in sorted(set(self.each("run")))]

    def by_run(self, figure: Callable[[Samples[Sample]], float | None]) -> list[float | None]:
        """A figure of each run, runs in order."""
        return [figure(samples) for samples in self.runs()]


def in_turn(arms: Sequence[Arm], shift: int) -> list[Arm]:
    """The arms in order, beginning with the one at `shift`."""
    first = shift % len(arms)
    return [*arms[first:], *arms[:first]]


def quotient(numerator: float | None, denominator: float | None) -> float | None:
    """None where there is nothing to divide, or to divide by."""
    return None if numerator is None or not denominator else numerator / denominator


def over(first: Iterable[float | None], second: Iterable[float | None]) -> list[float]:
    """The ratio of two figures run by run; without runs that lack one of them."""
    return known(quotient(mine, theirs) for mine, theirs in zip(first, second, strict=False))


def known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def percentile(values: Iterable[float | None], percent: float) -> float | None:
    """With linear interpolation between the two nearest; None of nothing."""
    taken = known(values)
    return float(np.percentile(taken, percent)) if taken else None


def rounded(value: float | None, digits: int = 3) -> float | None:
    """For a row; None stays None."""
    return None if value is None else round(value, digits)


def milliseconds(seconds: float | None) -> float | None:
    """For a row; None stays None."""
    return None if seconds is None else round(1000 * seconds, 3)


def spread(name: str, by_run: Iterable[float | None], digits: int = 3) -> dict[str, float | None]:
    """Fields of a row: the median over runs as `name`, the least and the most as `name_min` and `name_max`."""
    values = known(by_run)
    middle, least, most = (statistics.median(values), min(values), max(values)) if values else (None, None, None)
    return {name: rounded(middle, digits), f"{name}_min": rounded(least, digits), f"{name}_max": rounded(most, digits)}


def bootstrap_ratio(pairs: Sequence[tuple[float, float]], seed: int = 0) -> tuple[float, float] | None:
    """95 % interval of the sum of the first over the sum of the second, pairs drawn with replacement.

    The percentile method (Efron and Tibshirani, 1993, chapter 13). None of fewer than two pairs.
    """
    if len(pairs) < 2:
        return None
    taken = np.asarray(pairs)
    drawn = np.random.default_rng(seed).integers(len(taken), size=(NUM_RESAMPLES, len(taken)))
    first, second = taken[drawn].sum(axis=1).T
    low, high = np.percentile(first / second, (2.5, 97.5))
    return float(low), float(high)


@dataclass(frozen=True, slots=True)
class Ratios:
    """Named ratios of a report: the median over runs, and the least and most of one run."""

    values: Mapping[str, float]
    spread: Mapping[str, Sequence[float]]

    @classmethod
    def of(cls, by_run: Mapping[str, Iterable[float | None]], digits: int = 4) -> Ratios:
        """Medians over runs; a ratio without a value in any run is left out."""
        values = {name: taken for name, each in by_run.items() if (taken := known(each))}
        return cls(
            {name: round(statistics.median(taken), digits) for name, taken in values.items()},
            {name: [round(min(taken), digits), round(max(taken), digits)] for name, taken in values.items()},
        )


def at_temperature(name: str, temperature: float) -> str:
    """A ratio's name: plain at temperature 0, `NAME@T1` at 1."""
    return name if temperature == 0 else f"{name}@T{temperature:g}"


@contextlib.contextmanager
def progress(label: str, total: int) -> Iterator[Callable[..., None]]:
    """A bar on stderr, so that stdout can be piped; call what it yields after each step, or with a number of steps."""
    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        step = bar.add_task(label, total=total)

        def advance(steps: int = 1, done: str = "") -> None:
            if done:
                bar.console.print(done, markup=False, highlight=False)
            bar.advance(step, steps)

        yield advance
