"""How much longer small passes take with more rows, measured while a target is loaded.

Kernels compute rows in blocks of their own (six on one of our machines), so that some of the next rows are nearly free
and others cost a whole block. Nothing of this decides on a token.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from coppice.core.tree import chain
from verifier_svc.engine.kv_cache import SequenceCache
from verifier_svc.engine.pass_plan import SequenceRows, padded_sizes

if TYPE_CHECKING:
    from verifier_svc.model.target_model import TargetModel

# Rows of the largest pass that is measured, and tokens before it, as a request may have.
_MOST_ROWS = 24
_CONTEXT = 256
# Passes of each size; of fewer nothing is believed. Of these the quartile counts: slower ones were held up, and the
# very quickest are too few to be much the same when measured again.
_MOST_TURNS = 24
_FEWEST_TURNS = 4


@dataclass(frozen=True, slots=True)
class PassCurve:
    """`times[n]` of a pass with n + 1 rows, that of the smallest one being 1; more rows never take less time.

    Raises:
        ValueError: there are fewer than two times, or they are not in order.
    """

    times: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.times) < 2 or self.times[0] <= 0 or any(a > b for a, b in itertools.pairwise(self.times)):
            raise ValueError(f"times of passes must be positive and grow with their rows, got {self.times}")

    @classmethod
    def line(cls, per_row: float) -> Self:
        """A curve on which every row takes this part of the smallest pass."""
        return cls((1.0, 1.0 + per_row))

    @classmethod
    def of_sizes(cls, sizes: Sequence[int], seconds: Sequence[float]) -> Self:
        """The curve of passes that have one of some sizes, in order, each filled up to the next."""
        longest = list(itertools.accumulate(seconds, max))
        padded = [next(at for at, size in enumerate(sizes) if size >= rows) for rows in range(1, sizes[-1] + 1)]
        return cls(tuple([longest[at] / longest[0] for at in padded]))

    def at(self, rows: int) -> float:
        """The time of a pass with so many rows; beyond those measured, each takes as long as they do on average."""
        times = self.times
        if rows <= len(times):
            return times[max(rows, 1) - 1]
        return times[-1] + (rows - len(times)) * self.per_row

    @property
    def per_row(self) -> float:
        """What a row takes on average, where blocks do not matter."""
        return (self.times[-1] - self.times[0]) / (len(self.times) - 1)


def measure_curve(
    target: TargetModel, max_tokens: int, limit_s: float, clock: Callable[[], float] = time.perf_counter
) -> PassCurve | None:
    """The curve of a target's passes over one sequence of at most `max_tokens` tokens.

    All sizes take turns. The sequence's keys and values are whatever is there. None where passes take too long to be
    measured in `limit_s`, and where there is no room for such a sequence.
    """
    sizes = padded_sizes(_MOST_ROWS, target.row_multiple)
    context = min(_CONTEXT, max_tokens - sizes[-1])
    cache = SequenceCache(target.cache, max(1, context + sizes[-1]))
    if context < 1 or cache.num_missing(context + sizes[-1]) > target.cache.num_free_blocks:
        return None
    cache.reserve(context)
    cache.keep(range(context))
    taken_s: list[list[float]] = [[] for _ in sizes]
    started_s = clock()
    turns = 0
    while turns < _MOST_TURNS and clock() - started_s < limit_s:
        for at, size in enumerate(sizes):
            plan = target.plan([SequenceRows(cache, [0], chain([0] * (size - 1)))])
            before_s = clock()
            target.forward(plan)
            took_s = clock() - before_s
            # The first turn meets every size's machine code.
            if turns:
                taken_s[at].append(took_s)
            elif took_s * len(sizes) * _FEWEST_TURNS > limit_s:
                cache.release()
                return None
        turns += 1
    cache.release()
    if turns < _FEWEST_TURNS:
        return None
    return PassCurve.of_sizes(sizes, [sorted(taken)[len(taken) // 4] for taken in taken_s])
