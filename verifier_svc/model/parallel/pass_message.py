"""A pass as bytes for other ranks: one array of 64-bit integers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from verifier_svc.engine.kv_cache import IntArray
from verifier_svc.engine.pass_plan import PassPlan, Segment

# Arrays of the whole pass in a message; three more follow per segment.
_SHARED_ARRAYS = 8
_SEGMENT_ARRAYS = 3


@dataclass(frozen=True, slots=True)
class PassStep:
    """A plan, and slots to move from `sources` to `destinations` before it."""

    plan: PassPlan
    sources: IntArray
    destinations: IntArray


def encode(step: PassStep) -> bytes:
    """Number of arrays, their lengths, then the arrays in order."""
    plan = step.plan
    arrays = [
        plan.token_ids,
        plan.positions,
        plan.write_slots,
        plan.logit_rows,
        np.array(plan.logit_ranges, np.int64).reshape(-1),
        np.array([plan.num_rows], np.int64),
        step.sources,
        step.destinations,
    ]
    for segment in plan.segments:
        numbers = segment.start, segment.stop, segment.num_context, segment.num_pending, segment.is_long
        arrays += [np.array(numbers, np.int64), np.array(segment.parents, np.int64), segment.table]
    lengths = np.array([len(arrays), *(len(array) for array in arrays)], np.int64)
    return np.concatenate([lengths, *arrays]).tobytes()


def decode(message: bytearray) -> PassStep:
    """Decode a message; the arrays are views of it, so it must not be changed."""
    numbers = np.frombuffer(message, np.int64)
    count = int(numbers[0])
    arrays = np.split(numbers[1 + count :], np.cumsum(numbers[1:count]))
    token_ids, positions, write_slots, logit_rows, ranges, num_rows, sources, destinations = arrays[:_SHARED_ARRAYS]
    segments = [
        _segment(arrays[first : first + _SEGMENT_ARRAYS], positions)
        for first in range(_SHARED_ARRAYS, count, _SEGMENT_ARRAYS)
    ]
    plan = PassPlan(
        token_ids=token_ids,
        positions=positions,
        write_slots=write_slots,
        segments=tuple(segments),
        logit_rows=logit_rows,
        logit_ranges=tuple((first, last) for first, last in ranges.reshape(-1, 2).tolist()),
        num_rows=int(num_rows[0]),
    )
    return PassStep(plan, sources, destinations)


def _segment(arrays: list[IntArray], positions: IntArray) -> Segment:
    numbers, parents, table = arrays
    start, stop, num_context, num_pending, is_long = numbers.tolist()
    return Segment(
        start,
        stop,
        num_context,
        num_pending,
        tuple(parents.tolist()),
        positions[start:stop],
        table,
        is_long=bool(is_long),
    )
