"""Tree attention: the attention function that an unmodified Hugging Face model calls in every layer.

It owns the keys and values (the model runs with `use_cache=False`), stores each pass's rows in the paged cache and
lets every row attend to its committed context and its ancestors (SpecInfer, section 3.2).
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface

from coppice.errors import IncompatibleError
from verifier_svc.kv_cache import KVCache
from verifier_svc.pass_plan import PassPlan, Segment

# Tensors that models pass along and that plain softmax attention does not need: positions are in the plan.
_IGNORED_TENSORS = frozenset({"position_ids", "cache_position", "position_embeddings", "attention_mask"})
# Rows of a long prompt that are scored together.
_BLOCK_ROWS = 64
_names = itertools.count()


class TreeAttention:
    """Attention over one model's paged cache.

    With `exact` the scores and sums are computed in float64 and rounded once: a row's result then does not depend on
    the rows beside it.
    """

    def __init__(self, cache: KVCache, *, exact: bool) -> None:
        self.cache = cache
        self._exact = exact
        self._plan: PassPlan | None = None
        # transformers finds attention functions by name; every instance has its own.
        self.name = f"coppice_tree_{next(_names)}"
        AttentionInterface.register(self.name, self._attend)

    def begin(self, plan: PassPlan) -> None:
        """The model's next forward computes this plan."""
        self._plan = plan

    def end(self) -> None:
        """The forward is over."""
        self._plan = None

    def _attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """`query` [1, heads, N, dim], `key` and `value` [1, kv_heads, N, dim] to [1, N, heads, dim].

        Raises:
            IncompatibleError: the model asks for something that this function does not compute.
        """
        _refuse_unknown(others, dropout)
        plan = self._plan
        if plan is None:
            raise IncompatibleError("the model called tree attention outside a pass")
        rows = plan.num_rows
        layer: int = module.layer_idx  # type: ignore[assignment]
        new_keys, new_values = key[0, :, :rows].transpose(0, 1), value[0, :, :rows].transpose(0, 1)
        keys, values = self.cache.write(layer, plan.write_slots, new_keys, new_values)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        output = query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1])
        for segment in plan.segments:
            mask = _mask(segment, sliding_window)
            rows_query = query[0, :, segment.start : segment.stop]
            context_keys = keys.index_select(0, segment.read_slots).transpose(0, 1)
            context_values = values.index_select(0, segment.read_slots).transpose(0, 1)
            if self._exact or softcap is not None or s_aux is not None:
                dtype = torch.float64 if self._exact else torch.float32
                result = _blockwise(
                    segment, rows_query, context_keys.to(dtype), context_values.to(dtype), mask, scale, softcap, s_aux
                )
            else:
                result = _fused_attention(rows_query, context_keys, context_values, mask, scale)
            output[0, segment.start : segment.stop] = result.transpose(0, 1)
        return output, None


def _mask(segment: Segment, sliding_window: int | None) -> Tensor | None:
    """Visible keys [rows, keys] of a segment; None when every row sees every key."""
    keys = segment.key_positions.shape[0]
    mask = None
    if segment.visible is not None:
        rows = segment.visible.shape[0]
        mask = torch.ones(rows, keys, dtype=torch.bool, device=segment.visible.device)
        mask[:, segment.num_context :] = segment.visible
    if sliding_window is not None and keys > sliding_window:
        near = segment.query_positions[:, None] - segment.key_positions[None, :] < sliding_window
        mask = near if mask is None else mask & near
    return mask


def _blockwise(
    segment: Segment,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """`_attention` in blocks of rows, each over the keys up to its own last row: no row sees a later one."""
    rows = query.shape[1]
    if rows <= _BLOCK_ROWS:
        return _attention(query, keys, values, mask, scale, softcap, sinks)
    results = []
    for start in range(0, rows, _BLOCK_ROWS):
        stop = min(start + _BLOCK_ROWS, rows)
        end = segment.num_context + stop
        block_mask = None if mask is None else mask[start:stop, :end]
        block = _attention(query[:, start:stop], keys[:, :end], values[:, :end], block_mask, scale, softcap, sinks)
        results.append(block)
    return torch.cat(results, 1)


def _attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Softmax attention in the keys' dtype, rounded to the query's.

    `query` [heads, rows, dim], `keys` and `values` [kv_heads, keys, dim] to [heads, rows, dim].
    """
    heads, rows, dim = query.shape
    kv_heads, num_keys, value_dim = values.shape
    dtype = keys.dtype
    group = heads // kv_heads
    grouped = query.reshape(kv_heads, group * rows, dim).to(dtype) * scale
    scores = torch.bmm(grouped, keys.transpose(1, 2)).view(kv_heads, group, rows, num_keys)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill_(~mask, float("-inf"))
    if sinks is not None:
        column = sinks.to(dtype).view(kv_heads, group, 1, 1).expand(-1, -1, rows, 1)
        weights = torch.cat([scores, column], -1).softmax(-1)[..., :num_keys]
    else:
        weights = scores.softmax(-1)
    result = torch.bmm(weights.reshape(kv_heads, group * rows, num_keys), values)
    return result.view(heads, rows, value_dim).to(query.dtype)


def _fused_attention(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """The same through PyTorch's fused kernel, in the model's own dtype."""
    return F.scaled_dot_product_attention(
        query[None], keys[None], values[None], attn_mask=mask, scale=scale, enable_gqa=True
    )[0]


def _refuse_unknown(others: dict[str, Any], dropout: float) -> None:
    if dropout:
        raise IncompatibleError("the model applies dropout while serving")
    for name, value in others.items():
        if isinstance(value, Tensor) and name not in _IGNORED_TENSORS:
            raise IncompatibleError(f"the model's attention needs {name!r}, which is not supported")
