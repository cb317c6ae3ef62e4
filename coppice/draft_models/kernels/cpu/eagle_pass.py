"""A whole draft of an EAGLE-3 layer in one compiled call: new committed rows, then a best-first search.

The layer's loops are those of `llama_pass`, the rules of the search those of `tree_search`. A row's input is the
embedding of its token, and either the fused features of the row that the token was drawn from or, for drafted tokens,
the drafter's own state of the parent's row.

Axes: R new rows, S cached rows, H query heads, K key heads, D head size, h hidden, F numbers of a feature, V
vocabulary, N tokens that can be drafted: the draft vocabulary, and more tokens of one request.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from coppice.draft_models.kernels.cpu.int8_weights import Weights
from coppice.draft_models.kernels.cpu.llama_pass import LayerMatrices, keep_rows, multiply, run_layer
from coppice.draft_models.kernels.cpu.tree_search import (
    NO_NODE,
    SearchLimits,
    add_children,
    best_nodes,
    new_nodes,
    new_search_rows,
    num_kept_nodes,
    pick_nodes,
    place_rows,
    renumbered,
)
from coppice.kernels.cpu.compiler import compiled
from coppice.kernels.cpu.half_tables import HalfArray
from coppice.kernels.cpu.norms import rms_norm
from coppice.kernels.cpu.top_scores import top_scores

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]


class EagleMatrices(NamedTuple):
    """Weights of the drafter. `feature_norm` [F] is empty without one; `embedding` [V, h] is in bfloat16."""

    embedding: HalfArray
    feature_norm: FloatArray
    fusion: Weights
    token_norm: FloatArray
    state_norm: FloatArray
    layer: LayerMatrices
    norm: FloatArray
    head: Weights


class EagleSizes(NamedTuple):
    """Numbers that are not in the shapes of matrices."""

    heads: int
    eps: float
    norm_before_residual: bool


class FoundDraft(NamedTuple):
    """The tree in `TokenTree`'s form, with places among the N tokens for ids, and the last committed row's state."""

    places: IntArray
    parents: IntArray
    log_probs: FloatArray
    state: FloatArray


@compiled
def fuse(matrices: EagleMatrices, features: FloatArray, eps: float) -> FloatArray:
    """Inputs [R, h] of committed rows from their features [R, F]."""
    inputs = np.empty((len(features), len(matrices.fusion.scales)), np.float32)
    normed = features
    if len(matrices.feature_norm) > 0:
        normed = np.empty_like(features)
        rms_norm(features, matrices.feature_norm, eps, normed)
    multiply(normed, matrices.fusion.values, matrices.fusion.scales, inputs)
    return inputs


@compiled
def attention_inputs(matrices: EagleMatrices, token_ids: IntArray, inputs: FloatArray, eps: float) -> FloatArray:
    """Normed embeddings and inputs of rows, side by side [R, 2h]."""
    rows, width = inputs.shape
    bits = np.empty((rows, width), np.uint32)
    for row in range(rows):
        embedding = matrices.embedding[token_ids[row]]
        for column in range(width):
            bits[row, column] = np.uint32(embedding[column]) << np.uint32(16)
    normed = np.empty((rows, width), np.float32)
    both = np.empty((rows, 2 * width), np.float32)
    rms_norm(bits.view(np.float32), matrices.token_norm, eps, normed)
    both[:, :width] = normed
    rms_norm(inputs, matrices.state_norm, eps, normed)
    both[:, width:] = normed
    return both


@compiled
def see_eagle(
    matrices: EagleMatrices,
    sizes: EagleSizes,
    kv: FloatArray,
    first: int,
    token_ids: IntArray,
    features: FloatArray,
    positions: IntArray,
    cos: FloatArray,
    signed_sin: FloatArray,
) -> None:
    """Write keys and values of committed rows from place `first` of a cache on, and nothing else of them."""
    both = attention_inputs(matrices, token_ids, fuse(matrices, features, sizes.eps), sizes.eps)
    keep_rows(matrices.layer, both, kv, first, cos, signed_sin, positions, sizes.heads)


@compiled
def run_eagle(
    matrices: EagleMatrices,
    sizes: EagleSizes,
    kv: FloatArray,
    length: int,
    token_ids: IntArray,
    inputs: FloatArray,
    cos: FloatArray,
    signed_sin: FloatArray,
    positions: IntArray,
    mask: FloatArray,
) -> FloatArray:
    """Append rows to a cache; returns their states [R, h].

    Args:
        matrices: the drafter's.
        sizes: the drafter's.
        kv: keys and values [2, K, capacity, D] with `length` valid rows; the new ones are written.
        length: S.
        token_ids: [R].
        inputs: [R, h].
        cos: by position [positions, D].
        signed_sin: by position [positions, D].
        positions: [R].
        mask: [R, S + R]; negative where a row does not see another.
    """
    both = attention_inputs(matrices, token_ids, inputs, sizes.eps)
    hidden = np.empty(inputs.shape, np.float32)
    hidden[:] = both[:, inputs.shape[1] :] if sizes.norm_before_residual else inputs
    run_layer(matrices.layer, hidden, both, kv, length, cos, signed_sin, positions, mask, sizes.heads, sizes.eps)
    return hidden


@compiled
def score_states(matrices: EagleMatrices, extra: Weights, states: FloatArray, eps: float) -> FloatArray:
    """Logits [R, N] of states [R, h]; `extra` are output rows of further tokens."""
    rows, own, others = len(states), len(matrices.head.scales), len(extra.scales)
    final = np.empty(states.shape, np.float32)
    rms_norm(states, matrices.norm, eps, final)
    logits = np.empty((rows, own), np.float32)
    multiply(final, matrices.head.values, matrices.head.scales, logits)
    if others == 0:
        return logits
    more = np.empty((rows, others), np.float32)
    multiply(final, extra.values, extra.scales, more)
    every = np.empty((rows, own + others), np.float32)
    every[:, :own] = logits
    every[:, own:] = more
    return every


@compiled
def search_eagle(
    matrices: EagleMatrices,
    sizes: EagleSizes,
    extra: Weights,
    draft_ids: IntArray,
    kv: FloatArray,
    length: int,
    state: FloatArray,
    unread: IntArray,
    features: FloatArray,
    unread_positions: IntArray,
    root_position: int,
    cos: FloatArray,
    signed_sin: FloatArray,
    noise: FloatArray,
    sigmas: FloatArray,
    limits: SearchLimits,
) -> FoundDraft:
    """Likeliest nodes after the last committed row.

    Args:
        matrices: the drafter's.
        sizes: the drafter's.
        extra: output rows of further tokens.
        draft_ids: ids of the tokens that can be drafted [N].
        kv: keys and values [2, K, capacity, D] with room for the unread rows and `max_steps * width` more.
        length: cached rows, all of committed tokens.
        state: the last committed row's [h]; ignored with unread rows.
        unread: committed tokens after the cached ones [R].
        features: their features [R, F].
        unread_positions: their positions [R].
        root_position: the last committed row's position.
        cos: by position [positions, D].
        signed_sin: by position [positions, D].
        noise: noise[d] is added to the logits of nodes at depth d (root: 0) [more than max_steps, N]; no rows at
            temperature 0.
        sigmas: scales of the softmax of children of nodes at depth d [more than max_steps].
        limits: limits of the search.
    """
    if len(unread) > 0:
        states = read_eagle(matrices, sizes, kv, length, unread, features, unread_positions, cos, signed_sin)
        state = states[len(unread) - 1]
        length += len(unread)
    most_rows = limits.max_steps * limits.width
    states = np.empty((1 + most_rows, len(state)), np.float32)
    # The root's is first.
    states[0] = state
    nodes = new_nodes((1 + most_rows) * limits.children, limits.max_nodes)
    rows = new_search_rows(most_rows, limits.children)
    scores = score_states(matrices, extra, states[:1], sizes.eps)
    if len(noise) > 0:
        scores[0] += noise[0]
    tokens, log_probs, counts = top_scores(scores, sigmas[0], limits.children)
    add_children(nodes, NO_NODE, tokens[0, : counts[0]], log_probs[0, : counts[0]], limits)
    num_rows = 0
    for _ in range(limits.max_steps):
        picked = pick_nodes(nodes, limits)
        count = len(picked)
        if count == 0:
            break
        positions, mask = place_rows(nodes, rows, picked, num_rows, length)
        # Positions of rows and of places in the cache differ once rows were dropped.
        positions += root_position + 1 - length
        inputs = np.empty((count, len(state)), np.float32)
        for offset in range(count):
            inputs[offset] = states[1 + rows.parents[num_rows + offset]]
        token_ids = draft_ids[nodes.token_ids[picked]]
        found = run_eagle(matrices, sizes, kv, length + num_rows, token_ids, inputs, cos, signed_sin, positions, mask)
        states[1 + num_rows : 1 + num_rows + count] = found
        scores = score_states(matrices, extra, found, sizes.eps)
        for offset in range(count):
            depth = nodes.depths[picked[offset]]
            if len(noise) > 0:
                scores[offset] += noise[depth]
            tokens, log_probs, counts = top_scores(scores[offset : offset + 1], sigmas[depth], limits.children)
            add_children(nodes, picked[offset], tokens[0, : counts[0]], log_probs[0, : counts[0]], limits)
        num_rows += count
    kept = best_nodes(nodes, num_kept_nodes(nodes, limits))
    return FoundDraft(nodes.token_ids[kept], renumbered(nodes.parents[kept], kept), nodes.log_probs[kept], states[0])


@compiled
def read_eagle(
    matrices: EagleMatrices,
    sizes: EagleSizes,
    kv: FloatArray,
    length: int,
    token_ids: IntArray,
    features: FloatArray,
    positions: IntArray,
    cos: FloatArray,
    signed_sin: FloatArray,
) -> FloatArray:
    """Append rows of committed tokens, each after the ones before it; returns their states [R, h]."""
    count = len(token_ids)
    mask = np.zeros((count, length + count), np.float32)
    for row in range(count):
        mask[row, length + row + 1 :] = -np.inf
    inputs = fuse(matrices, features, sizes.eps)
    return run_eagle(matrices, sizes, kv, length, token_ids, inputs, cos, signed_sin, positions, mask)
