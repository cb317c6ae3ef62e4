"""Rows of a pass, and request and result of a whole tree search in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from coppice.search.tree_limits import Children, TreeLimits

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]


class Rows(NamedTuple):
    """New rows of one forward pass: R after S cached ones.

    `token_ids` [R], `positions` [R]; `mask` [R, S + R] is added to attention scores: 0 where a row sees another, else
    -inf. Logits are returned for the last `num_logits` rows.
    """

    token_ids: IntArray
    positions: IntArray
    mask: FloatArray
    num_logits: int


class WholeSearch(NamedTuple):
    """A search after the last committed token, for requests whose scores are logits plus noise.

    `unread` are committed tokens without cached rows, at most the forward's `max_unread`, to be read first. Without
    any, `root` has the children of the last committed token; otherwise it is None. `noise` [1 + steps, vocab] is added
    to the logits of the last committed token and of nodes at depth 1, 2, ...; it has no rows at temperature 0. `sigma`
    is the coupling's scale, `max_children` the most children per node.
    """

    unread: Sequence[int]
    root: Children | None
    noise: FloatArray
    sigma: np.float32
    limits: TreeLimits
    max_children: int


class Found(NamedTuple):
    """The tree in `TokenTree`'s form, the root's children, and the rows computed for the tree, in order.

    Rows of unread tokens precede those of the tree. Of `child_token_ids` and `child_log_probs` [rows, max_children] the
    first `child_counts` entries of each row are valid.
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
