"""What drafters count of themselves, read before and after each completion."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from coppice.lab.bench.contenders import Completion, Contender, Task
from coppice.lab.bench.counters import Counters, parse_counters, read_counters

_PREFIX = "coppice_drafter_"
_DRAFTS = f"{_PREFIX}draft_seconds_count"
_DRAFT_S = f"{_PREFIX}draft_seconds_sum"
_OBSERVED = f"{_PREFIX}observed_nodes_total"
_EXPECTED = f"{_PREFIX}expected_acceptance_total"
_ACCEPTED = f"{_PREFIX}accepted_nodes_total"
_COUNTED = (_OBSERVED, _EXPECTED, _ACCEPTED)
_NAMES = (_DRAFTS, _DRAFT_S, *_COUNTED)


@dataclass(frozen=True, slots=True)
class Reading(Counters):
    """Counts of drafters, added up, or what they grew by."""

    @property
    def num_trees(self) -> int:
        """Trees that were drafted, those that had grown not counted again."""
        return round(self.total(_DRAFTS))

    @property
    def draft_ms(self) -> float | None:
        """Milliseconds per tree, prompts included."""
        return 1000 * self.total(_DRAFT_S) / self.num_trees if self.num_trees else None

    @property
    def num_observed(self) -> int:
        """Nodes whose parent was committed."""
        return round(self.total(_OBSERVED))

    @property
    def calibration_error(self) -> float | None:
        """Mean difference of expected and observed acceptance over tenths of probability and classes of temperature."""
        if not self.num_observed:
            return None
        return sum(abs(expected - accepted) for _, expected, accepted in self._tenths()) / self.num_observed

    @property
    def chance_error(self) -> float | None:
        """What that difference would be by chance, about, if every node were as likely as it was expected to be."""
        if not self.num_observed:
            return None
        variances = (expected * max(0.0, 1 - expected / nodes) for nodes, expected, _ in self._tenths() if nodes)
        # The mean size of a normal deviate.
        return sum(math.sqrt(2 / math.pi * variance) for variance in variances) / self.num_observed

    def _tenths(self) -> Iterator[tuple[float, float, float]]:
        """Nodes, expected and accepted ones, of every tenth of probability and class of temperature."""
        for labels in {labels for name, labels in self.values if name == _OBSERVED}:
            nodes, expected, accepted = (self.values.get((name, labels), 0.0) for name in _COUNTED)
            yield nodes, expected, accepted


def parse_reading(text: str) -> Reading:
    """The counts in a drafter's metrics."""
    return Reading(parse_counters(text, _NAMES))


class MeteredContender:
    """A contender whose drafters' counts are read around every completion, outside of its time."""

    def __init__(self, contender: Contender, urls: Sequence[str]) -> None:
        """`urls` are those of the metrics of the drafters that it asks."""
        self.name = contender.name
        self.note = contender.note
        self._contender = contender
        self._urls = tuple(urls)
        # One per completion, with its temperature; those of the warm-up are the first.
        self.readings: list[tuple[float, Reading]] = []

    def complete(self, task: Task) -> Completion:
        """Complete one task.

        Raises:
            BenchmarkError: the call failed, or the metrics cannot be had.
        """
        before = self._read()
        completion = self._contender.complete(task)
        self.readings.append((task.temperature, self._read().plus(before, -1)))
        return completion

    def last(self, num_completions: int, temperature: float) -> Reading:
        """What the last completions, of which those at a temperature are wanted, took together."""
        total = Reading()
        for at, reading in self.readings[len(self.readings) - num_completions :]:
            if at == temperature:
                total = total.plus(reading)
        return total

    def _read(self) -> Reading:
        total = Reading()
        for url in self._urls:
            total = total.plus(Reading(read_counters(url, _NAMES, "a drafter")))
        return total
