"""Search of `transition_tree`, compiled: in Python each of its few nodes takes longer than its scores.

`tree_builder` does the same without a compiler.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from coppice.kernels.cpu.compiler import compiled
from coppice.kernels.cpu.half_products import scores_behind
from coppice.kernels.cpu.half_tables import FloatArray, HalfArray
from coppice.kernels.cpu.top_scores import top_scores

IntArray = npt.NDArray[np.int64]
_ROOT = -1
_ONE = np.float32(1)


class Tables(NamedTuple):
    """Tables of token scores given the previous token, see `half_products.scores_behind`.

    `scores` [depths, vocab] are scores by depth without the previous token, `sigmas` [depths] their scales, `before`
    [vocab, rank] and `behind` [rank, vocab] the tables of the transition.
    """

    scores: FloatArray
    sigmas: FloatArray
    before: FloatArray
    behind: HalfArray


class Bounds(NamedTuple):
    """Most nodes, most children per node; least path log-probabilities to expand and to keep a node."""

    max_nodes: int
    max_children: int
    least_expanded: float
    least_kept: float


class Nodes(NamedTuple):
    """Best nodes so far, likeliest first, ties by age; `parents` refer to `numbers`."""

    token_ids: IntArray
    parents: IntArray
    depths: IntArray
    log_probs: FloatArray
    paths: npt.NDArray[np.float64]
    numbers: IntArray
    is_expanded: npt.NDArray[np.bool_]


@compiled
def search_behind_token(
    token_id: int, tables: Tables, bounds: Bounds
) -> tuple[IntArray, IntArray, FloatArray, npt.NDArray[np.float64]]:
    """Like `search`, with the root's children given by `tables` after a token."""
    tokens, log_probs = _children(token_id, 0, tables, bounds)
    return search(tokens, log_probs, 1, tables, bounds)


@compiled
def search(
    token_ids: IntArray, log_probs: FloatArray, first_depth: int, tables: Tables, bounds: Bounds
) -> tuple[IntArray, IntArray, FloatArray, npt.NDArray[np.float64]]:
    """Likeliest nodes by path probability, as found by `tree_builder.build_tree`.

    Args:
        token_ids: the root's children [n], likeliest first.
        log_probs: their log-probabilities [n].
        first_depth: depth in `tables` of these nodes' children.
        tables: scores of deeper nodes.
        bounds: limits of the search.

    Returns:
        token ids, parents, log-probabilities and path log-probabilities, all [nodes], likeliest first.
    """
    size = bounds.max_nodes
    nodes = Nodes(
        np.zeros(size, np.int64),
        np.zeros(size, np.int64),
        np.zeros(size, np.int64),
        np.zeros(size, np.float32),
        np.zeros(size, np.float64),
        np.zeros(size, np.int64),
        np.zeros(size, np.bool_),
    )
    count, num_seen = _add(nodes, 0, 0, _ROOT, first_depth, 0.0, token_ids, log_probs, bounds)
    place = 0
    while place < count:
        # Children come after their parent, so earlier places are final.
        path = nodes.paths[place]
        may_enter = count < size or path > nodes.paths[count - 1]
        if not nodes.is_expanded[place] and path >= bounds.least_expanded and may_enter:
            nodes.is_expanded[place] = True
            depth = nodes.depths[place]
            if depth < len(tables.scores):
                tokens, values = _children(nodes.token_ids[place], depth, tables, bounds)
                number = nodes.numbers[place]
                count, num_seen = _add(nodes, count, num_seen, number, depth + 1, path, tokens, values, bounds)
        place += 1
    parents = np.full(count, _ROOT, np.int64)
    for node in range(count):
        for above in range(node):
            if nodes.numbers[above] == nodes.parents[node]:
                parents[node] = above
    return nodes.token_ids[:count], parents, nodes.log_probs[:count], nodes.paths[:count]


@compiled
def _children(token_id: int, depth: int, tables: Tables, bounds: Bounds) -> tuple[IntArray, FloatArray]:
    scores = scores_behind(
        tables.scores,
        np.full(1, depth, np.int64),
        tables.before[token_id : token_id + 1],
        tables.behind,
        tables.sigmas[depth : depth + 1],
    )
    tokens, log_probs, counts = top_scores(scores, _ONE, min(bounds.max_children, scores.shape[1]))
    return tokens[0, : counts[0]], log_probs[0, : counts[0]]


@compiled
def _add(
    nodes: Nodes,
    count: int,
    num_seen: int,
    parent: int,
    depth: int,
    path: float,
    token_ids: IntArray,
    log_probs: FloatArray,
    bounds: Bounds,
) -> tuple[int, int]:
    """Insert a node's children that are among the best; returns the number of nodes kept and of nodes ever seen."""
    size = bounds.max_nodes
    for child in range(len(token_ids)):
        value = path + log_probs[child]
        if value < bounds.least_kept or (count == size and value <= nodes.paths[size - 1]):
            break
        place = min(count, size - 1)
        while place > 0 and nodes.paths[place - 1] < value:
            nodes.token_ids[place] = nodes.token_ids[place - 1]
            nodes.parents[place] = nodes.parents[place - 1]
            nodes.depths[place] = nodes.depths[place - 1]
            nodes.log_probs[place] = nodes.log_probs[place - 1]
            nodes.paths[place] = nodes.paths[place - 1]
            nodes.numbers[place] = nodes.numbers[place - 1]
            nodes.is_expanded[place] = nodes.is_expanded[place - 1]
            place -= 1
        nodes.token_ids[place] = token_ids[child]
        nodes.parents[place] = parent
        nodes.depths[place] = depth
        nodes.log_probs[place] = log_probs[child]
        nodes.paths[place] = value
        nodes.numbers[place] = num_seen
        nodes.is_expanded[place] = False
        count = min(count + 1, size)
        num_seen += 1
    return count, num_seen
