"""A whole draft search in one compiled call: `tree_builder.build_tree` over passes of `llama_pass`.

A draft has about five steps of a quarter of a millisecond. The work between steps (masks, noise, children, choice of
nodes) costs as much again in Python, as does the time between an outcome and the first step; so the call starts with
the unread committed tokens. The rules are those of `build_tree`, and tests compare the trees; this search starts from
an empty tree and only supports noise.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from coppice.draft_models.kernels.base import Found, WholeSearch
from coppice.draft_models.kernels.cpu.llama_pass import FewRowsPass, FewRowsWeights, run_rows
from coppice.kernels.cpu.compiler import compiled
from coppice.kernels.cpu.top_scores import top_scores
from coppice.search.tree_limits import Children, TreeLimits

FloatArray = npt.NDArray[np.float32]
PathArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

NO_NODE = -1


class SearchLimits(NamedTuple):
    """`tree_builder.TreeLimits` for compiled code; `children`: most children per node."""

    max_nodes: int
    width: int
    max_steps: int
    max_depth: int
    min_step_gain: float
    min_path_log_prob: float
    min_fill_log_prob: float
    row_multiple: int
    children: int

    @classmethod
    def of(cls, limits: TreeLimits, children: int) -> SearchLimits:
        """Limits for compiled code, with at most `children` per node."""
        return cls(
            limits.max_nodes,
            limits.width,
            limits.max_steps,
            limits.max_depth,
            float(limits.min_step_gain),
            float(limits.min_path_log_prob),
            float(limits.min_fill_log_prob),
            limits.row_multiple,
            children,
        )


class CompiledLlama(FewRowsPass):
    """A Llama's compiled pass over a few rows, and the search over such passes."""

    def search(self, kv: FloatArray, length: int, search: WholeSearch) -> Found:
        """Search after the first `length` rows of `kv`.

        There must be room for the unread tokens and all rows that the limits allow.
        """
        limits = search.limits
        root = Children((), ()) if search.root is None else search.root
        found: Found = search_tree(
            self._weights,
            kv,
            length,
            self._heads,
            self._eps,
            np.asarray(search.unread, np.int64),
            np.asarray(root.token_ids, np.int64),
            np.asarray(root.log_probs, np.float32),
            search.noise,
            search.sigma,
            SearchLimits.of(limits, min(search.max_children, len(self._weights.embedding))),
        )
        return found


class SearchNodes(NamedTuple):
    """All candidates so far, parents before children; the first `totals[0]` entries are valid.

    `rows` are the rows of expanded nodes. `best` are path log-probabilities of the best `max_nodes`, worst first, of
    which the last `totals[1]` are valid.
    """

    token_ids: IntArray
    parents: IntArray
    depths: IntArray
    log_probs: FloatArray
    paths: PathArray
    is_open: npt.NDArray[np.bool_]
    rows: IntArray
    best: PathArray
    totals: IntArray


class ExpandedRows(NamedTuple):
    """Expanded nodes in order of their rows, with their parents' rows and their children."""

    nodes: IntArray
    parents: IntArray
    child_token_ids: IntArray
    child_log_probs: FloatArray
    child_counts: IntArray


@compiled
def search_tree(
    weights: FewRowsWeights,
    kv: FloatArray,
    length: int,
    heads: int,
    eps: float,
    unread: IntArray,
    root_token_ids: IntArray,
    root_log_probs: FloatArray,
    noise: FloatArray,
    sigma: np.float32,
    limits: SearchLimits,
) -> Found:
    """Likeliest nodes after the root, and the rows computed for them.

    Args:
        weights: the model.
        kv: keys and values [L, 2, K, capacity, D] with room for the unread tokens and `max_steps * width` rows after
        the
            first `length`.
        length: cached rows, all of committed tokens.
        heads: query heads.
        eps: the epsilon of the norms.
        unread: committed tokens after the cached ones; their rows are computed first.
        root_token_ids: the root's children, likeliest first [n]; ignored with unread tokens.
        root_log_probs: their log-probabilities [n].
        noise: noise[d] is added to the logits of nodes at depth d (root: 0) [more than max_steps, vocab]; no rows at
            temperature 0.
        sigma: the coupling's scale.
        limits: limits of the search.
    """
    if len(unread) > 0:
        scores = _read(weights, kv, length, unread, heads, eps)
        if len(noise) > 0:
            scores[0] += noise[0]
        tokens, log_probs, counts = top_scores(scores, sigma, limits.children)
        root_token_ids, root_log_probs = tokens[0, : counts[0]], log_probs[0, : counts[0]]
        length += len(unread)
    most_rows = limits.max_steps * limits.width
    nodes = new_nodes(len(root_token_ids) + most_rows * limits.children, limits.max_nodes)
    rows = new_search_rows(most_rows, limits.children)
    add_children(nodes, NO_NODE, root_token_ids, root_log_probs, limits)
    num_rows = 0
    for _ in range(limits.max_steps):
        picked = pick_nodes(nodes, limits)
        count = len(picked)
        if count == 0:
            break
        positions, mask = place_rows(nodes, rows, picked, num_rows, length)
        token_ids = nodes.token_ids[picked]
        scores = run_rows(weights, kv, length + num_rows, token_ids, positions, mask, count, heads, eps)
        if len(noise) > 0:
            for offset in range(count):
                scores[offset] += noise[nodes.depths[picked[offset]]]
        tokens, log_probs, counts = top_scores(scores, sigma, limits.children)
        end = num_rows + count
        rows.child_token_ids[num_rows:end] = tokens
        rows.child_log_probs[num_rows:end] = log_probs
        rows.child_counts[num_rows:end] = counts
        for offset in range(count):
            some = counts[offset]
            add_children(nodes, picked[offset], tokens[offset, :some], log_probs[offset, :some], limits)
        num_rows = end
    kept = best_nodes(nodes, num_kept_nodes(nodes, limits))
    return Found(
        nodes.token_ids[kept],
        renumbered(nodes.parents[kept], kept),
        nodes.log_probs[kept],
        root_token_ids,
        root_log_probs,
        nodes.token_ids[rows.nodes[:num_rows]],
        rows.parents[:num_rows],
        rows.child_token_ids[:num_rows],
        rows.child_log_probs[:num_rows],
        rows.child_counts[:num_rows],
    )


@compiled
def _read(weights: FewRowsWeights, kv: FloatArray, length: int, unread: IntArray, heads: int, eps: float) -> FloatArray:
    """Append rows for committed tokens; returns the logits after the last [1, vocab]."""
    count = len(unread)
    mask = np.zeros((count, length + count), np.float32)
    for row in range(count):
        mask[row, length + row + 1 :] = -np.inf
    return run_rows(weights, kv, length, unread, np.arange(length, length + count), mask, 1, heads, eps)


@compiled
def new_nodes(capacity: int, max_nodes: int) -> SearchNodes:
    return SearchNodes(
        np.empty(capacity, np.int64),
        np.empty(capacity, np.int64),
        np.empty(capacity, np.int64),
        np.empty(capacity, np.float32),
        np.empty(capacity, np.float64),
        np.zeros(capacity, np.bool_),
        np.full(capacity, NO_NODE, np.int64),
        np.empty(max_nodes, np.float64),
        np.zeros(2, np.int64),
    )


@compiled
def new_search_rows(capacity: int, children: int) -> ExpandedRows:
    return ExpandedRows(
        np.empty(capacity, np.int64),
        np.empty(capacity, np.int64),
        np.empty((capacity, children), np.int64),
        np.empty((capacity, children), np.float32),
        np.empty(capacity, np.int64),
    )


@compiled
def place_rows(
    nodes: SearchNodes, rows: ExpandedRows, picked: IntArray, num_rows: int, length: int
) -> tuple[IntArray, FloatArray]:
    """Assign rows to the picked nodes; returns their positions and mask for `run_rows`."""
    count = len(picked)
    positions = np.empty(count, np.int64)
    mask = np.full((count, length + num_rows + count), np.float32(-np.inf))
    for offset in range(count):
        row = num_rows + offset
        node = picked[offset]
        parent = nodes.parents[node]
        nodes.rows[node] = row
        rows.nodes[row] = node
        rows.parents[row] = NO_NODE if parent == NO_NODE else nodes.rows[parent]
        positions[offset] = length + nodes.depths[node] - 1
        mask[offset, :length] = 0
        while row != NO_NODE:
            mask[offset, length + row] = 0
            row = rows.parents[row]
    return positions, mask


@compiled
def _can_enter(nodes: SearchNodes, path: float, limits: SearchLimits) -> bool:
    """Whether a new node of at most this path log-probability could be among the best."""
    return bool(nodes.totals[1] < limits.max_nodes or path > nodes.best[0])


@compiled
def add_children(
    nodes: SearchNodes, parent: int, token_ids: IntArray, log_probs: FloatArray, limits: SearchLimits
) -> None:
    """Add the children of an expanded node that could be among the best."""
    depth = 1
    above = 0.0
    if parent != NO_NODE:
        depth = nodes.depths[parent] + 1
        above = nodes.paths[parent]
    for child in range(len(token_ids)):
        path = above + np.float64(log_probs[child])
        if path < limits.min_fill_log_prob or not _can_enter(nodes, path, limits):
            return
        node = nodes.totals[0]
        nodes.totals[0] += 1
        nodes.token_ids[node] = token_ids[child]
        nodes.parents[node] = parent
        nodes.depths[node] = depth
        nodes.log_probs[node] = log_probs[child]
        nodes.paths[node] = path
        nodes.is_open[node] = depth < limits.max_depth
        _rank(nodes, path, limits.max_nodes)


@compiled
def _rank(nodes: SearchNodes, path: float, max_nodes: int) -> None:
    """Insert a path log-probability among the best; the worst is dropped if there are too many."""
    best = nodes.best
    if nodes.totals[1] < max_nodes:
        nodes.totals[1] += 1
        place = max_nodes - nodes.totals[1]
        # Sorted at the end of the array; the worst is at 0 only when it is full.
        while place + 1 < max_nodes and best[place + 1] < path:
            best[place] = best[place + 1]
            place += 1
        best[place] = path
        return
    place = 0
    while place + 1 < max_nodes and best[place + 1] < path:
        best[place] = best[place + 1]
        place += 1
    best[place] = path


@compiled
def pick_nodes(nodes: SearchNodes, limits: SearchLimits) -> IntArray:
    """Nodes to expand in the next step; empty if no step can improve the tree or pays."""
    picked = np.empty(limits.width, np.int64)
    count = 0
    gain = 0.0
    while count < limits.width:
        chosen = NO_NODE
        for node in range(nodes.totals[0]):
            if nodes.is_open[node] and (chosen == NO_NODE or nodes.paths[node] > nodes.paths[chosen]):
                chosen = node
        if chosen == NO_NODE:
            break
        path = nodes.paths[chosen]
        if path < limits.min_path_log_prob or not _can_enter(nodes, path, limits):
            break
        nodes.is_open[chosen] = False
        picked[count] = chosen
        count += 1
        gain += np.exp(nodes.paths[chosen])
    if gain < limits.min_step_gain:
        count = 0
    return picked[:count]


@compiled
def num_kept_nodes(nodes: SearchNodes, limits: SearchLimits) -> int:
    """Like `TreeLimits.num_kept`."""
    total = nodes.totals[0]
    worth = 0
    for node in range(total):
        worth += nodes.paths[node] >= limits.min_path_log_prob
    multiple = limits.row_multiple
    rows = (min(worth, limits.max_nodes) + multiple) // multiple * multiple
    return int(min(rows - 1, total, limits.max_nodes))


@compiled
def best_nodes(nodes: SearchNodes, num_kept: int) -> IntArray:
    """The best candidates in ascending order; ties go to the earlier one, so parents precede children."""
    total = nodes.totals[0]
    is_kept = np.zeros(total, np.bool_)
    for _ in range(num_kept):
        chosen = NO_NODE
        for node in range(total):
            if not is_kept[node] and (chosen == NO_NODE or nodes.paths[node] > nodes.paths[chosen]):
                chosen = node
        is_kept[chosen] = True
    return np.nonzero(is_kept)[0]


@compiled
def renumbered(parents: IntArray, kept: IntArray) -> IntArray:
    """Parents as indices among the kept nodes."""
    places = np.empty(len(parents), np.int64)
    for index in range(len(parents)):
        places[index] = NO_NODE if parents[index] == NO_NODE else np.searchsorted(kept, parents[index])
    return places
