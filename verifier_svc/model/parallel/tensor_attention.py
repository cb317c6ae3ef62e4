"""Tree attention in tensor operations, for any device, dtype and rule. Gathers a sequence's keys per layer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from verifier_svc.engine.kv_cache import BLOCK_SIZE, IntArray, slots_of
from verifier_svc.engine.pass_plan import PassPlan, Segment, visibility
from verifier_svc.kernels.base import AttentionRule

# Rows of a long prompt scored together.
_BLOCK_ROWS = 64


@dataclass(frozen=True, slots=True)
class _SegmentTensors:
    """A segment on the device: `visible` [rows, rows] is None for a single row."""

    start: int
    stop: int
    num_context: int
    read_slots: Tensor
    visible: Tensor | None
    query_positions: Tensor
    key_positions: Tensor

    @property
    def distances(self) -> Tensor:
        """Positions from every key to every row [rows, keys]."""
        return self.query_positions[:, None] - self.key_positions[None, :]

    def biases(self, rule: AttentionRule, dtype: torch.dtype) -> Tensor | None:
        """Biases of scores [heads, rows or 1, keys]; None without."""
        if rule.slopes is None:
            return None
        if rule.rounds_biases:
            rounded = rule.slopes.bfloat16()[:, None, None] * self.key_positions
            return rounded.to(dtype) * rule.scale
        return -rule.slopes.to(dtype)[:, None, None] * self.distances.to(dtype)


class TensorKernel:
    """Keys and values of every layer as [slots, kv_heads, dim].

    With `exact`, scores and sums are computed in float64 and rounded once, so that a row's result does not depend on
    other rows.
    """

    def __init__(self, device: torch.device, *, exact: bool) -> None:
        self._device = device
        self._exact = exact
        self._num_slots = 0
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._write_slots = torch.empty(0, dtype=torch.long)
        self._segments: list[_SegmentTensors] = []

    @property
    def bytes_per_slot(self) -> int:
        """Bytes per token over all layers seen so far."""
        buffers = (*self._keys.values(), *self._values.values())
        return sum(buffer[0].numel() * buffer.element_size() for buffer in buffers)

    def allocate(self, num_blocks: int) -> None:
        """Allocate this many blocks, dropping contents."""
        self._num_slots = num_blocks * BLOCK_SIZE
        self._keys, self._values = {}, {}

    def begin(self, plan: PassPlan, sources: IntArray, destinations: IntArray) -> None:
        """Move slots and begin a pass."""
        if len(sources):
            read, written = self._on_device(sources), self._on_device(destinations)
            for buffer in (*self._keys.values(), *self._values.values()):
                buffer.index_copy_(0, written, buffer.index_select(0, read))
        self._write_slots = self._on_device(plan.write_slots)
        self._segments = [self._describe(segment) for segment in plan.segments]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        """See `AttentionKernel`; supports everything."""
        keys, values = self._store(layer, key, value)
        output = query.new_zeros(query.shape[1], query.shape[0], value.shape[-1])
        for rows in self._segments:
            mask = _mask(rows, rule)
            rows_query = query[:, rows.start : rows.stop]
            seen_keys = keys.index_select(0, rows.read_slots).transpose(0, 1)
            seen_values = values.index_select(0, rows.read_slots).transpose(0, 1)
            if self._exact or rule.softcap is not None or rule.sinks is not None or rule.slopes is not None:
                dtype = torch.float64 if self._exact else torch.float32
                seen = seen_keys.to(dtype), seen_values.to(dtype)
                biases = rows.biases(rule, dtype)
                result = _blockwise(rows.num_context, rows_query, *seen, mask, rule, biases)
            else:
                result = _fused_attention(rows_query, seen_keys, seen_values, mask, rule.scale)
            output[rows.start : rows.stop] = result.transpose(0, 1)
        return output

    def _store(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        rows = len(self._write_slots)
        new_keys, new_values = key[:, :rows].transpose(0, 1), value[:, :rows].transpose(0, 1)
        if layer not in self._keys:
            self._keys[layer] = new_keys.new_empty(self._num_slots, *new_keys.shape[1:])
            self._values[layer] = new_values.new_empty(self._num_slots, *new_values.shape[1:])
        self._keys[layer].index_copy_(0, self._write_slots, new_keys)
        self._values[layer].index_copy_(0, self._write_slots, new_values)
        return self._keys[layer], self._values[layer]

    def _describe(self, segment: Segment) -> _SegmentTensors:
        context = segment.num_context
        is_single = segment.stop - segment.start == 1
        visible = None if is_single else torch.from_numpy(visibility(segment.num_pending, segment.parents))
        return _SegmentTensors(
            start=segment.start,
            stop=segment.stop,
            num_context=context,
            read_slots=self._on_device(_slots(segment)),
            visible=None if visible is None else visible.to(self._device),
            query_positions=self._on_device(segment.positions),
            key_positions=self._on_device(np.concatenate([np.arange(context), segment.positions])),
        )

    def _on_device(self, array: IntArray) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def _slots(segment: Segment) -> IntArray:
    """Slots of the context and of the segment's own rows."""
    return slots_of(segment.table, np.append(np.arange(segment.num_context), segment.num_context + segment.row_places))


def _mask(rows: _SegmentTensors, rule: AttentionRule) -> Tensor | None:
    """Visible keys [rows, keys] of a segment; None if every row sees every key."""
    keys = rows.key_positions.shape[0]
    mask = None
    if rows.visible is not None:
        mask = torch.ones(len(rows.visible), keys, dtype=torch.bool, device=rows.visible.device)
        mask[:, rows.num_context :] = rows.visible
    if rule.sliding_window is not None and keys > rule.sliding_window:
        near = rows.distances < rule.sliding_window
        mask = near if mask is None else mask & near
    if rule.chunk is not None and keys > 1:
        same = rows.query_positions[:, None] // rule.chunk == rows.key_positions[None, :] // rule.chunk
        mask = same if mask is None else mask & same
    return mask


def _blockwise(
    num_context: int,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    rule: AttentionRule,
    biases: Tensor | None,
) -> Tensor:
    """`_attention` in blocks of rows, each over the keys up to its last row: no row sees a later one."""
    rows = query.shape[1]
    if rows <= _BLOCK_ROWS:
        return _attention(query, keys, values, mask, rule, biases)
    results = []
    for start in range(0, rows, _BLOCK_ROWS):
        stop = min(start + _BLOCK_ROWS, rows)
        end = num_context + stop
        block_mask = None if mask is None else mask[start:stop, :end]
        some = slice(start, stop) if biases is not None and biases.shape[1] > 1 else slice(None)
        block_biases = None if biases is None else biases[:, some, :end]
        block = _attention(query[:, start:stop], keys[:, :end], values[:, :end], block_mask, rule, block_biases)
        results.append(block)
    return torch.cat(results, 1)


def _attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    rule: AttentionRule,
    biases: Tensor | None,
) -> Tensor:
    """Softmax attention in the keys' dtype, rounded to the query's.

    `query` [heads, rows, dim], `keys` and `values` [kv_heads, keys, dim] to [heads, rows, dim]; `biases`
    [heads, rows or 1, keys] are added to scores.
    """
    heads, rows, dim = query.shape
    kv_heads, num_keys, value_dim = values.shape
    dtype = keys.dtype
    group = heads // kv_heads
    grouped = query.reshape(kv_heads, group * rows, dim).to(dtype) * rule.scale
    scores = torch.bmm(grouped, keys.transpose(1, 2)).view(kv_heads, group, rows, num_keys)
    if rule.softcap is not None:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    if biases is not None:
        scores = scores + biases.view(kv_heads, group, -1, num_keys)
    if mask is not None:
        scores = scores.masked_fill_(~mask, float("-inf"))
    if rule.sinks is not None:
        column = rule.sinks.to(dtype).view(kv_heads, group, 1, 1).expand(-1, -1, rows, 1)
        weights = torch.cat([scores, column], -1).softmax(-1)[..., :num_keys]
    else:
        weights = scores.softmax(-1)
    result = torch.bmm(weights.reshape(kv_heads, group * rows, num_keys), values)
    return result.view(heads, rows, value_dim).to(query.dtype)


def _fused_attention(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Attention by PyTorch's fused kernel, in the model's own dtype."""
    return F.scaled_dot_product_attention(
        query[None], keys[None], values[None], attn_mask=mask, scale=scale, enable_gqa=True
    )[0]
