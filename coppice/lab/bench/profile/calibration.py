"""What was recorded under one load that a machine is fitted to. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from coppice.lab.bench.profile.nonnegative import Floats, nonnegative
from coppice.lab.bench.profile.records import PassRecord, Records
from coppice.lab.simulator.machine import PassWork


@dataclass(frozen=True, slots=True)
class Calibration:
    """One load: whether its requests asked for drafts, how many there were at once, and what services did meanwhile."""

    speculates: bool
    concurrency: int
    records: Records

    @property
    def next_passes(self) -> Iterator[tuple[PassRecord, PassRecord]]:
        """Passes and the ones behind them that have a request in common, so that there was work all the while."""
        for first, second in pairwise(self.records.passes):
            if {one.request_id for one in first.rounds} & {one.request_id for one in second.rounds}:
                yield first, second


def work_of(one: PassRecord) -> PassWork:
    """What a pass computed. The row of a prompt's last token counts as its first round's."""
    round_rows = sum(1 + each.num_nodes for each in one.rounds)
    context_rows = sum((1 + each.num_nodes) * each.base_length for each in one.rounds)
    return PassWork(len(one.rounds), round_rows, max(0, one.rows - round_rows), context_rows)


@dataclass(frozen=True, slots=True)
class Observations:
    """Of one load: what times depend on, [N, F], and the times, [N] in seconds."""

    features: Floats
    seconds: Floats


def fit(groups: Sequence[Observations]) -> Floats:
    """Coefficients [F] from 0 on. Each load counts the same, by its relative errors, however many passes it had.

    Within a load all passes weigh the same, so that times add up to what was measured; medians would not.
    """
    known = [group for group in groups if len(group.seconds) and group.seconds.mean() > 0]
    weights = [1 / (group.seconds.mean() * len(group.seconds) ** 0.5) for group in known]
    features = np.concatenate([weight * group.features for weight, group in zip(weights, known, strict=True)])
    seconds = np.concatenate([weight * group.seconds for weight, group in zip(weights, known, strict=True)])
    return nonnegative(features, seconds)


def observations(features: Sequence[Sequence[float]], seconds: Sequence[float], num_features: int) -> Observations:
    """From lists, which may be empty."""
    return Observations(np.array(features, float).reshape(len(seconds), num_features), np.array(seconds, float))
