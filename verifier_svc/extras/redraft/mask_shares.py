"""How many masks the sequences of a pass get: they are the last to get rows, and only rows that cost next to nothing.

What is next to nothing: a number of rows that the kernels compute in about the time of one, and, once it is known what
passes cost, rows that make a pass longer by a quarter. A prompt that is alone may grow by an eighth for its first
draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from verifier_svc.engine.pass_shares import SHARED_ROWS, RowAllotment

# Rows that take so many parts of the time of a pass by itself are next to nothing, up to a number of them.
OWN_PART = 4
MOST_FREE_ROWS = 4 * SHARED_ROWS
# A pass over one prompt alone may have a mask for each of so many tokens.
PROMPT_PART = 8


def deal_masks(
    shares: Sequence[RowAllotment], *, free_rows: int, own_rows: float, max_rows: int = 0
) -> list[RowAllotment]:
    """Give masks to those who can use them, one group to each, then a second; none where a pass is full.

    Args:
        shares: of all sequences.
        free_rows: rows of a pass that cost next to nothing, before it is known what they cost.
        own_rows: rows that take as long as a pass does by itself; 0 while that is unknown.
        max_rows: of a pass; 0 for no limit.
    """
    num_rows = sum(share.num_rows for share in shares)
    limit = max(free_rows, int(min(own_rows / OWN_PART, MOST_FREE_ROWS)))
    if len(shares) == 1:
        limit = max(limit, num_rows + shares[0].num_pending // PROMPT_PART)
    left = (min(limit, max_rows) if max_rows else limit) - num_rows
    shapes = [share.sequence.mask_shape if _ends_prompt(share) else None for share in shares]
    masks = [0] * len(shares)
    for turn in range(max((shape.num_groups for shape in shapes if shape is not None), default=0)):
        for index, shape in enumerate(shapes):
            if left <= 0:
                break
            if shape is not None and turn < shape.num_groups:
                given = min(shape.num_masks, left)
                masks[index] += given
                left -= given
    return [replace(share, max_masks=count) if count else share for share, count in zip(shares, masks, strict=True)]


def _ends_prompt(share: RowAllotment) -> bool:
    """Whether a token comes out of it at all."""
    return share.num_pending == share.sequence.num_pending
