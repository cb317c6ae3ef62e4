"""Device code of recurrences with a matrix as state, in Triton: the rules of `kernels/cpu/linear_recurrences.py`.

A program walks the rows of one segment for some columns of one head's state, which stays in registers between a row and
the next. Columns do not meet. The same code computes passes and commits, no argument but pointers varies, and sums over
keys have one order: a row's bits depend on its path alone.

Import fails without Triton. With TRITON_INTERPRET=1 in the environment, the code runs in Triton's interpreter.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def advance_walks(
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    decays: tl.tensor,
    strengths: tl.tensor,
    rates: tl.tensor,
    starts: tl.tensor,
    steps: tl.tensor,
    slots: tl.tensor,
    after: tl.tensor,
    scratch: tl.tensor,
    output: tl.tensor,
    FIELDS: tl.constexpr,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    DECAYS: tl.constexpr,
    STRENGTHS: tl.constexpr,
    CORRECTS: tl.constexpr,
    HAS_RATES: tl.constexpr,
) -> None:
    """Outputs [N, HEADS, VALUES], and states [places, HEADS, KEYS, VALUES] as the steps say (`walks.py`).

    Grid (walks, heads, parts of COLUMNS columns). Queries and keys [N, GROUPS, KEYS], values [N, HEADS, VALUES], decays
    [N, HEADS, DECAYS], strengths of the update [N, HEADS, STRENGTHS], rates [HEADS, KEYS, VALUES], all contiguous.
    """
    walk, head = tl.program_id(0), tl.program_id(1)
    group = head * GROUPS // HEADS
    key = tl.arange(0, WIDTH)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    is_key, is_column = key < KEYS, column < VALUES
    is_there = is_key[:, None] & is_column[None, :]
    place = (head * KEYS + key[:, None]) * VALUES + column[None, :]
    size: tl.constexpr = HEADS * KEYS * VALUES
    if HAS_RATES:
        rate = tl.load(rates + place, mask=is_there, other=0.0)
    state = tl.zeros([WIDTH, COLUMNS], tl.float32)
    for step in tl.range(tl.load(starts + walk), tl.load(starts + walk + 1)):
        row = tl.load(steps + step * FIELDS).to(tl.int64)
        from_slot = tl.load(steps + step * FIELDS + 1).to(tl.int64)
        from_after = tl.load(steps + step * FIELDS + 2).to(tl.int64)
        from_scratch = tl.load(steps + step * FIELDS + 3).to(tl.int64)
        to_slot = tl.load(steps + step * FIELDS + 4).to(tl.int64)
        to_after = tl.load(steps + step * FIELDS + 5).to(tl.int64)
        to_scratch = tl.load(steps + step * FIELDS + 6).to(tl.int64)
        if from_slot >= 0:
            state = tl.load(slots + from_slot * size + place, mask=is_there, other=0.0)
        if from_after >= 0:
            state = tl.load(after + from_after * size + place, mask=is_there, other=0.0)
        if from_scratch >= 0:
            state = tl.load(scratch + from_scratch * size + place, mask=is_there, other=0.0)

        row_query = tl.load(queries + (row * GROUPS + group) * KEYS + key, mask=is_key, other=0.0)
        row_key = tl.load(keys + (row * GROUPS + group) * KEYS + key, mask=is_key, other=0.0)
        head_row = row * HEADS + head
        change = tl.load(values + head_row * VALUES + column, mask=is_column, other=0.0)
        # One for the head, or one for each column.
        own = column if STRENGTHS > 1 else column * 0
        strength = tl.load(strengths + head_row * STRENGTHS + own, mask=is_column, other=0.0)
        if HAS_RATES:
            state = state * tl.exp(-rate * strength[None, :])
        else:
            # One for the head, or one for each key.
            own_decay = key if DECAYS > 1 else key * 0
            decay = tl.load(decays + head_row * DECAYS + own_decay, mask=is_key, other=0.0)
            state = state * decay[:, None]
        if CORRECTS:
            change = change - tl.sum(state * row_key[:, None], 0)
        state = state + row_key[:, None] * (change * strength)[None, :]
        tl.store(output + head_row * VALUES + column, tl.sum(state * row_query[:, None], 0), mask=is_column)

        if to_slot >= 0 or to_after >= 0 or to_scratch >= 0:
            # A thread may read what another has written, and write what another has read.
            tl.debug_barrier()
            if to_slot >= 0:
                tl.store(slots + to_slot * size + place, state, mask=is_there)
            if to_after >= 0:
                tl.store(after + to_after * size + place, state, mask=is_there)
            if to_scratch >= 0:
                tl.store(scratch + to_scratch * size + place, state, mask=is_there)
            tl.debug_barrier()
