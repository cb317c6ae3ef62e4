"""Measures, while a target is loaded, how much longer its small passes take with more rows."""

from __future__ import annotations

import time
from collections.abc import Callable

from coppice.core.tree import chain
from verifier_svc.engine.kv_cache import SequenceCache
from verifier_svc.engine.pass_plan import SequenceRows, padded_sizes
from verifier_svc.model.pass_curve import PassCurve
from verifier_svc.model.target_model import TargetModel

# Rows of the largest pass that is measured, and tokens before it, as a request may have.
_MOST_ROWS = 24
_CONTEXT = 256
# Passes of each size; of fewer nothing is believed. Of these the quartile counts: slower ones were held up, and the
# very quickest are too few to be much the same when measured again.
_MOST_TURNS = 24
_FEWEST_TURNS = 4


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
