"""Counters of a service, read from its metrics page."""

from __future__ import annotations

import urllib.request
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Self

from prometheus_client.parser import text_string_to_metric_families

from coppice.lab.bench.harness.experiment import BenchmarkError

TIMEOUT_S = 10.0

# A counter's name and its labels.
Series = tuple[str, tuple[tuple[str, str], ...]]


@dataclass(frozen=True, slots=True)
class Counters:
    """Counts by series: as they were read, added up, or what they grew by."""

    values: Mapping[Series, float] = field(default_factory=dict)

    def plus(self, other: Self, sign: int = 1) -> Self:
        """The sum, or the difference, series by series."""
        values = dict(self.values)
        for series, value in other.values.items():
            values[series] = values.get(series, 0.0) + sign * value
        return type(self)(values)

    def total(self, name: str) -> float:
        return sum(value for (found, _), value in self.values.items() if found == name)


def parse_counters(text: str, names: Collection[str]) -> dict[Series, float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name in names
    }


def read_counters(url: str, names: Collection[str], whose: str) -> dict[Series, float]:
    """The series of these names on the metrics page of one of our own services on this machine.

    Raises BenchmarkError if they cannot be had; the message says whose they are.
    """
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
            return parse_counters(response.read().decode(), names)
    except (OSError, ValueError) as error:
        raise BenchmarkError(f"no metrics of {whose} at {url}: {error}") from error
