"""Request and result of a search for a whole tree in one forward call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from coppice.search.tree_limits import Children, TreeLimits

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]


class WholeSearch(NamedTuple):
    """A search behind the last committed token, for requests whose scores are logits plus noise.

    `unread` are the committed tokens that the cache has no rows for yet, at most the forward's `max_unread`: they are
    read first. Where there are none, `root` holds the children behind the last committed token; else it is None.
    `noise` [1 + steps, vocab] is added to the logits of the last committed token and of nodes at depth 1, 2, ...; it
    has no rows without temperature. `sigma` is the coupling's scale, `max_children` the most children of one node
    that are looked at.
    """

    unread: Sequence[int]
    root: Children | None
    noise: FloatArray
    sigma: np.float32
    limits: TreeLimits
    max_children: int


class Found(NamedTuple):
    """The tree, as `TokenTree` has it, the root's children, and the rows that were computed for the tree, in order.

    The rows of unread tokens come before those of the tree. Of `child_token_ids` and `child_log_probs`
    [rows, max_children] the first `child_counts` of each row count.
    """

    token_ids: IntArray
    parents: IntArray
    log_probs: FloatArray
    root_token_ids: IntArray
    root_log_probs: FloatArray
    row_token_ids: IntArray
    row_parents: IntArray
    child_token_ids: IntArray
    child_log_probs: FloatArray
    child_counts: IntArray
