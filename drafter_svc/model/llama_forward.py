"""Lean forward pass for Llama models.

For small models most of transformers' time per step is overhead. Here query, key and value share one matrix, as do
gate and up; the cache is preallocated, and query heads that share a key head are folded into its rows. The remaining
overhead still dominates a draft on a CPU, where passes of up to a piece of a prompt use `kernels/cpu/llama_pass.py`.

Axes: R new rows, S cached rows, H query heads, K key heads, G = H / K, D head size, L layers, C capacity.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from coppice.draft_models.kernels.base import Found, Rows, WholeSearch
from coppice.draft_models.kernels.cpu.int8_inputs import is_available
from coppice.draft_models.kernels.cpu.tree_search import CompiledLlama
from coppice.kernels.cpu.packed_linear import Product, make_linear
from drafter_svc.model.hf_forward import max_positions, to_numpy
from drafter_svc.model.prefix_blocks import KvBlock
from drafter_svc.model.tree_cache import FloatArray

# Implementation of passes over few rows: torch; compiled with 8-bit weights; compiled with 8-bit weights and inputs.
FewRowsWay = Literal["tensors", "w8", "w8a8"]
# Row counts up to which the compiled pass is faster; measured on 4 to 64 rows of the bundled drafters, one thread.
MOST_ROWS: dict[FewRowsWay, int] = {"tensors": 0, "w8": 32, "w8a8": 64}
# Most unread tokens, and rows per step, of a search in one compiled call.
FEW_ROWS = 8
# Capacity is a multiple of this many rows, and at least doubles when exceeded.
CAPACITY_STEP = 256


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: Tensor
    qkv: Product
    output: Product
    mlp_norm: Tensor
    gate_up: Product
    down: Product


@dataclass(slots=True)
class KvStore:
    """Keys and values [L, 2, K, C, D] of one sequence, with `length` valid rows."""

    kv: Tensor
    length: int = 0


@dataclass(frozen=True, slots=True)
class _WeightPart:
    """One sequence's part of a pass: `count` rows, with a layer's output wanted for the last `wanted`.

    `mask` [G * wanted, S + count] is for folded heads; None if every row sees all.
    """

    store: KvStore
    count: int
    wanted: int
    mask: Tensor | None


def is_supported(model: PreTrainedModel) -> bool:
    """Whether the model is a Llama without biases, with default rotary positions and SiLU."""
    config = model.config
    return (
        type(model) is LlamaForCausalLM
        and config.hidden_act in ("silu", "swish")
        and (config.rope_parameters or {}).get("rope_type", "default") == "default"
        and not any(name.endswith("_proj.bias") for name, _ in model.named_parameters())
    )


def compiled_ways() -> list[FewRowsWay]:
    """Compiled implementations for this machine, fastest first."""
    return ["w8a8", "w8"] if is_available() else ["w8"]


class LlamaForward:
    """Forward pass over a copy of a model's weights; the model must satisfy `is_supported`."""

    @torch.inference_mode()
    def __init__(self, model: LlamaForCausalLM, few_rows: FewRowsWay = "tensors") -> None:
        """Copy the weights; `few_rows` other than "tensors" is for float32 on a CPU, and one of `compiled_ways`."""
        config = model.config
        self.vocab_size = config.vocab_size
        self.max_positions = max_positions(model)
        self._heads = config.num_attention_heads
        self._kv_heads = config.num_key_value_heads or self._heads
        self._head_size = getattr(config, "head_dim", None) or config.hidden_size // self._heads
        self._eps = config.rms_norm_eps
        self._embedding = model.model.embed_tokens.weight.detach()
        self._norm = model.model.norm.weight.detach()
        self._head = make_linear(model.lm_head.weight)
        self._layers = [_layer(layer) for layer in model.model.layers]
        self._cos, self._sin = _rotary_tables(model, self.max_positions)
        self._few_rows = None
        self._most_rows = MOST_ROWS[few_rows]
        self.max_unread = 0
        if few_rows != "tensors":
            self._few_rows = _compile_few_rows(model, self._cos, self._sin, round_inputs=few_rows == "w8a8")
            self.max_unread = FEW_ROWS

    def new_store(self) -> KvStore:
        """An empty store."""
        shape = (len(self._layers), 2, self._kv_heads, 0, self._head_size)
        return KvStore(self._embedding.new_empty(shape))

    @torch.inference_mode()
    def run(self, store: KvStore, rows: Rows) -> FloatArray:
        """Append the rows; returns logits [num_logits, vocab]."""
        count = len(rows.token_ids)
        if self._few_rows is None or count > self._most_rows:
            return self.run_many([(store, rows)])[0]
        _reserve(store, store.length + count)
        logits = self._few_rows.run(store.kv.numpy(), store.length, rows)
        store.length += count
        return logits

    @torch.inference_mode()
    def run_many(self, passes: Sequence[tuple[KvStore, Rows]]) -> list[FloatArray]:
        """Append rows of several sequences in one pass; only attention is per sequence."""
        device = self._embedding.device
        parts = [self._part(store, rows) for store, rows in passes]
        hidden = F.embedding(_joined([rows.token_ids for _, rows in passes], device), self._embedding)
        positions = _joined([rows.positions for _, rows in passes], device)
        rotation = self._cos[positions], self._sin[positions]
        for index, layer in enumerate(self._layers):
            if index + 1 == len(self._layers):
                # Of the other rows only the last layer's keys and values are needed.
                parts = [self._last_part(part, rows) for part, (_, rows) in zip(parts, passes, strict=True)]
            hidden = self._attend(layer, parts, index, hidden, rotation)
            normed = F.rms_norm(hidden, hidden.shape[-1:], layer.mlp_norm, self._eps)
            gate, up = layer.gate_up(normed).chunk(2, -1)
            hidden = hidden + layer.down(F.silu(gate).mul_(up))
        final = F.rms_norm(hidden, hidden.shape[-1:], self._norm, self._eps)
        logits = to_numpy(self._head(final))
        # At the end: a failed pass leaves no rows, so it can be repeated.
        for part in parts:
            part.store.length += part.count
        ends = list(itertools.accumulate(part.wanted for part in parts))
        return [logits[end - part.wanted : end] for part, end in zip(parts, ends, strict=True)]

    def _part(self, store: KvStore, rows: Rows) -> _WeightPart:
        count = len(rows.token_ids)
        _reserve(store, store.length + count)
        return _WeightPart(store, count, count, self._folded_mask(rows.mask))

    def _last_part(self, part: _WeightPart, rows: Rows) -> _WeightPart:
        """The part of a pass in the last layer, reduced to rows with logits."""
        if rows.num_logits == part.count:
            return part
        mask = self._folded_mask(rows.mask[part.count - rows.num_logits :])
        return replace(part, wanted=rows.num_logits, mask=mask)

    def keep(self, store: KvStore, first: int, rows: Sequence[int]) -> None:
        """Keep rows up to `first` and the given ones."""
        end = first + len(rows)
        if self._few_rows is not None:
            # Row by row, which is faster than a gather for an outcome's few rows. Rows only move down.
            kv = store.kv.numpy()
            for target, row in enumerate(rows, first):
                if row != target:
                    kv[:, :, :, target] = kv[:, :, :, row]
        elif list(rows) != list(range(first, end)):
            with torch.inference_mode():
                index = torch.tensor(rows, device=store.kv.device)
                store.kv[:, :, :, first:end] = store.kv.index_select(3, index)
        store.length = end

    @torch.inference_mode()
    def take(self, store: KvStore, first: int, last: int) -> KvBlock:
        """Copy of rows."""
        rows = store.kv[:, :, :, first:last].clone(memory_format=torch.contiguous_format)
        return KvBlock(rows, rows.nbytes)

    @torch.inference_mode()
    def put(self, store: KvStore, block: KvBlock) -> None:
        """Append copied rows."""
        rows: Tensor = block.content
        end = store.length + rows.shape[3]
        _reserve(store, end)
        store.kv[:, :, :, store.length : end] = rows
        store.length = end

    def search(self, store: KvStore, search: WholeSearch) -> Found | None:
        """A whole search in compiled code, if available and steps are narrow enough."""
        if self._few_rows is None or search.limits.width > FEW_ROWS:
            return None
        most_rows = len(search.unread) + search.limits.max_steps * search.limits.width
        _reserve(store, store.length + most_rows)
        found = self._few_rows.search(store.kv.numpy(), store.length, search)
        store.length += len(search.unread) + len(found.row_token_ids)
        return found

    def _folded_mask(self, mask: FloatArray) -> Tensor | None:
        """Mask [R, keys] for folded heads [G * R, keys]; None if every row sees all."""
        if not mask.any():
            return None
        folded = np.tile(mask, (self._heads // self._kv_heads, 1))
        return torch.from_numpy(folded).to(self._embedding.device, self._embedding.dtype)

    def _attend(
        self, layer: _Layer, parts: Sequence[_WeightPart], index: int, hidden: Tensor, rotation: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Hidden states of all parts' wanted rows [sum of wanted, hidden] after a layer's attention.

        Stores keys and values of all rows.
        """
        heads, kv_heads, size = self._heads, self._kv_heads, self._head_size
        normed = F.rms_norm(hidden, hidden.shape[-1:], layer.input_norm, self._eps)
        qkv = layer.qkv(normed).view(len(hidden), heads + 2 * kv_heads, size)
        cos, signed_sin = rotation
        turning = qkv[:, : heads + kv_heads]
        turned = torch.addcmul(turning * cos, turning.roll(size // 2, -1), signed_sin)
        seen, kept, end = [], [], 0
        for part in parts:
            start, end = end, end + part.count
            wanted, store = part.wanted, part.store
            kv = store.kv[index, :, :, : store.length + part.count]
            kv[0, :, store.length :] = turned[start:end, heads:].transpose(0, 1)
            kv[1, :, store.length :] = qkv[start:end, heads + kv_heads :].transpose(0, 1)
            folded = turned[end - wanted : end, :heads].reshape(wanted, kv_heads, -1, size).permute(1, 2, 0, 3)
            query = folded.reshape(1, kv_heads, -1, size)
            found = F.scaled_dot_product_attention(query, kv[0, None], kv[1, None], attn_mask=part.mask)
            seen.append(found.view(kv_heads, -1, wanted, size).permute(2, 0, 1, 3).reshape(wanted, heads * size))
            kept.append(hidden[end - wanted : end])
        return _cat(kept) + layer.output(_cat(seen))


def _compile_few_rows(model: LlamaForCausalLM, cos: Tensor, signed_sin: Tensor, *, round_inputs: bool) -> CompiledLlama:
    tables = cos[:, 0].contiguous().numpy(), signed_sin[:, 0].contiguous().numpy()
    return CompiledLlama(model, *tables, round_inputs=round_inputs)


def _layer(layer: LlamaDecoderLayer) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    qkv = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
    gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
    return _Layer(
        input_norm=layer.input_layernorm.weight.detach(),
        qkv=make_linear(qkv),
        output=make_linear(attention.o_proj.weight),
        mlp_norm=layer.post_attention_layernorm.weight.detach(),
        gate_up=make_linear(gate_up),
        down=make_linear(mlp.down_proj.weight),
    )


def _rotary_tables(model: LlamaForCausalLM, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines [positions, 1, D]: rotated x = x * cos + roll(x, D / 2) * signed sin."""
    frequencies = model.model.rotary_emb.inv_freq.float()
    angles = torch.arange(length, device=frequencies.device).float()[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    tables = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
    return tables[0][:, None].to(model.dtype), tables[1][:, None].to(model.dtype)


def _reserve(store: KvStore, length: int) -> None:
    """Make room for `length` rows."""
    capacity = store.kv.shape[3]
    if length <= capacity:
        return
    wanted = -(-max(length, 2 * capacity) // CAPACITY_STEP) * CAPACITY_STEP
    with torch.inference_mode():
        grown = store.kv.new_empty((*store.kv.shape[:3], wanted, store.kv.shape[4]))
        grown[:, :, :, : store.length] = store.kv[:, :, :, : store.length]
    store.kv = grown


def _joined(values: Sequence[npt.NDArray[np.int64]], device: torch.device) -> Tensor:
    return torch.from_numpy(values[0] if len(values) == 1 else np.concatenate(values)).to(device)


def _cat(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
