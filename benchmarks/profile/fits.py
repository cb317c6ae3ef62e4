"""From measured samples to the costs of a machine. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from benchmarks.profile.drafter_peer import DraftSeen
from benchmarks.profile.verifier_peer import PassSeen, Shape
from simulator.machine import Curve, DrafterCosts, non_falling

# Drafts are put together by size: from each of these to before the next.
SIZES = (0, 2, 4, 6, 8, 10, 12, 14, 16, 20, 24, 32, 48)
# Deviations of a normal distribution in units of the median absolute one.
_NORMAL = 1.4826
MIN_SAMPLES = 3


@dataclass(frozen=True, slots=True)
class ShapeTimes:
    """Medians over the passes of one shape: of the pass, and from its end to the next one's beginning."""

    shape: Shape
    pass_s: float
    gap_s: float
    num_passes: int


@dataclass(frozen=True, slots=True)
class PassFit:
    """Time of a pass, as `simulator.machine.VerifierCosts` has it."""

    passes: Curve
    sequence_s: float
    row_context_s: float


def shape_times(shape: Shape, passes: Sequence[PassSeen]) -> ShapeTimes | None:
    """Medians, or None where there are too few passes."""
    gaps = [later.came_s - earlier.came_s - later.pass_s for earlier, later in pairwise(passes)]
    if len(gaps) < MIN_SAMPLES:
        return None
    return ShapeTimes(shape, statistics.median(one.pass_s for one in passes), statistics.median(gaps), len(passes))


def fit_passes(times: Sequence[ShapeTimes], context: int, row_multiple: int) -> PassFit:
    """Shapes of the same rows tell what a sequence costs, other contexts what a row and token of context does."""
    near = [one for one in times if one.shape.context == context and not one.shape.right]
    groups: dict[int, list[ShapeTimes]] = {}
    for one in near:
        groups.setdefault(-(-one.shape.rows // row_multiple) * row_multiple, []).append(one)
    sequence_s = _slope_within(groups)
    sizes = sorted(groups)
    seconds = [
        statistics.median(one.pass_s - sequence_s * (one.shape.batch - 1) for one in groups[size]) for size in sizes
    ]
    curve = Curve(tuple(sizes), non_falling([max(0.0, value) for value in seconds]))
    far = [one for one in times if one.shape.context != context and not one.shape.right]
    products = [one.shape.rows * (one.shape.context - context) for one in far]
    excess = [one.pass_s - curve.at(one.shape.rows) - sequence_s * (one.shape.batch - 1) for one in far]
    return PassFit(curve, sequence_s, through_origin(products, excess))


def _slope_within(groups: Mapping[int, Sequence[ShapeTimes]]) -> float:
    over = under = 0.0
    for group in groups.values():
        batch = statistics.fmean(one.shape.batch for one in group)
        mean_s = statistics.fmean(one.pass_s for one in group)
        over += sum((one.shape.batch - batch) * (one.pass_s - mean_s) for one in group)
        under += sum((one.shape.batch - batch) ** 2 for one in group)
    return max(0.0, over / under) if under else 0.0


def through_origin(xs: Sequence[float], ys: Sequence[float]) -> float:
    """The slope from 0 on of a line through the origin, by least squares; 0 where there is nothing to fit."""
    under = sum(x * x for x in xs)
    return max(0.0, sum(x * y for x, y in zip(xs, ys, strict=True)) / under) if under else 0.0


def line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """Intercept and slope by least squares, neither of them negative."""
    slope = float(np.polyfit(xs, ys, 1)[0]) if len(set(xs)) > 1 else 0.0
    slope = max(0.0, slope)
    intercept = statistics.fmean(y - slope * x for x, y in zip(xs, ys, strict=True))
    if intercept < 0:
        return 0.0, through_origin(xs, ys)
    return intercept, slope


def fit_committed(times: Sequence[ShapeTimes]) -> float:
    """Seconds that a further committed token takes after a pass, from shapes that differ in nothing else."""
    by_shape = {one.shape: one for one in times}
    xs, ys = [], []
    for one in times:
        wrong = by_shape.get(Shape(one.shape.batch, one.shape.nodes, one.shape.context))
        if one.shape.right and wrong is not None:
            xs.append(float(one.shape.batch * one.shape.nodes))
            ys.append(one.gap_s - wrong.gap_s)
    return through_origin(xs, ys)


def fit_prompts(passes: Sequence[PassSeen], least_pass_s: float) -> float:
    """Seconds of a prompt's row, from passes over nothing but a prompt."""
    return max(0.0, statistics.median((one.pass_s - least_pass_s) / one.rows for one in passes))


def fit_drafts(rounds: Sequence[DraftSeen], first: Sequence[DraftSeen]) -> DrafterCosts:
    """A draft by its nodes from rounds on their way, reading from `first` drafts, behind whole prompts."""
    bins: dict[int, list[DraftSeen]] = {}
    for one in rounds:
        bins.setdefault(max(size for size in SIZES if size <= len(one.tree)), []).append(one)
    least = min(MIN_SAMPLES, max(map(len, bins.values())))
    full = [bins[size] for size in sorted(bins) if len(bins[size]) >= least]
    sizes = [round(statistics.fmean(len(one.tree) for one in group)) for group in full]
    seconds = non_falling([statistics.median(one.draft_s for one in group) for group in full])
    # Means of neighbouring bins may round to one size.
    points = dict(zip(sizes, seconds, strict=True))
    curve = Curve(tuple(points), tuple(points.values()))
    reads = [(one.draft_s - curve.at(len(one.tree))) / (one.num_unread - 1) for one in first if one.num_unread > 1]
    return DrafterCosts(curve, max(0.0, statistics.median(reads)))


def fit_noise(passes: Sequence[Sequence[PassSeen]]) -> float:
    """Standard deviation of the logarithm of a pass's time over its shape's median; outliers count little."""
    logs = []
    for group in passes:
        middle = statistics.median(one.pass_s for one in group)
        logs += [abs(math.log(one.pass_s / middle)) for one in group]
    return _NORMAL * statistics.median(logs)
