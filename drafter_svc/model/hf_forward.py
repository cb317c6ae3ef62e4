"""Any causal language model of transformers, unmodified: with its own KV cache, or without one."""

from __future__ import annotations

import inspect
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from coppice.checkpoints.hf_cache import cache_argument
from coppice.draft_models.kernels.base import Rows, WholeSearch
from drafter_svc.model.prefix_blocks import KvBlock
from drafter_svc.model.tree_cache import FloatArray

# For models without a stated context, to bound memory.
UNSTATED_CONTEXT = 32_768


def max_positions(model: PreTrainedModel) -> int:
    """Longest sequence that the model can read."""
    stated = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return stated if isinstance(stated, int) and stated > 0 else UNSTATED_CONTEXT


def vocab_size(model: PreTrainedModel) -> int:
    """Width of the model's logits."""
    size: int = model.config.get_text_config().vocab_size
    return size


def to_numpy(logits: Tensor) -> FloatArray:
    """Logits as float32 in host memory."""
    array: FloatArray = logits.float().cpu().numpy()
    return array


class CachedForward:
    """The model with its own KV cache and our 4-d mask.

    The cache has no configuration, so that layers with a sliding window keep all rows: a row's index in the cache is
    not its position.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self.vocab_size = vocab_size(model)
        self.max_positions = max_positions(model)
        self.max_unread = 0
        accepted = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in accepted
        self._cache_argument = cache_argument(model.forward)
        self._takes_num_logits = "logits_to_keep" in accepted

    def new_store(self) -> DynamicCache:
        """An empty cache."""
        return DynamicCache()

    @torch.inference_mode()
    def run(self, store: DynamicCache, rows: Rows) -> FloatArray:
        """Append the rows; returns logits [num_logits, vocab]."""
        device, dtype = self._model.device, self._model.dtype
        # The least finite number instead of -inf: some attention functions add to it.
        mask = torch.from_numpy(rows.mask).to(device, dtype).clamp_min(torch.finfo(dtype).min)
        options: dict[str, Any] = {}
        if self._takes_positions:
            options["position_ids"] = torch.from_numpy(rows.positions)[None].to(device)
        if self._takes_num_logits:
            options["logits_to_keep"] = rows.num_logits
        output = self._model(
            input_ids=torch.from_numpy(rows.token_ids)[None].to(device),
            attention_mask=mask[None, None],
            use_cache=True,
            **{self._cache_argument: store},
            **options,
        )
        return to_numpy(output.logits[0, -rows.num_logits :])

    @torch.inference_mode()
    def keep(self, store: DynamicCache, first: int, rows: Sequence[int]) -> None:
        """Keep rows up to `first` and the given ones."""
        index = torch.tensor([*range(first), *rows], device=self._model.device)
        for layer, keys, values in _layers(store):
            layer.keys = keys.index_select(-2, index)
            layer.values = values.index_select(-2, index)

    @torch.inference_mode()
    def take(self, store: DynamicCache, first: int, last: int) -> KvBlock:
        """A copy of rows."""
        layers = [
            (keys[..., first:last, :].clone(), values[..., first:last, :].clone()) for _, keys, values in _layers(store)
        ]
        return KvBlock(layers, sum(keys.nbytes + values.nbytes for keys, values in layers))

    @torch.inference_mode()
    def put(self, store: DynamicCache, block: KvBlock) -> None:
        """Append copied rows."""
        for index, (keys, values) in enumerate(block.content):
            store.update(keys, values, index)

    def search(self, store: DynamicCache, search: WholeSearch) -> None:
        """None: searches are made step by step."""


def _layers(store: DynamicCache) -> Iterator[tuple[DynamicLayer, Tensor, Tensor]]:
    """Each layer with its keys and values."""
    for layer in store.layers:
        if not isinstance(layer, DynamicLayer) or layer.keys is None or layer.values is None:
            raise TypeError(f"rows cannot be selected in a {type(layer).__name__}")
        yield layer, layer.keys, layer.values


@dataclass(slots=True)
class PlainStore:
    """The token ids of the cached rows."""

    token_ids: list[int] = field(default_factory=list)


class PlainForward:
    """The model without cache or mask: each row's path is computed from its start. Slow, correct for any model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self.vocab_size = vocab_size(model)
        self.max_positions = max_positions(model)
        self.max_unread = 0

    def new_store(self) -> PlainStore:
        """An empty store."""
        return PlainStore()

    @torch.inference_mode()
    def run(self, store: PlainStore, rows: Rows) -> FloatArray:
        """Append the rows; returns logits [num_logits, vocab]."""
        store.token_ids.extend(rows.token_ids.tolist())
        cached = np.asarray(store.token_ids)
        logits = []
        for visible in rows.mask[-rows.num_logits :] == 0:
            path = torch.from_numpy(cached[visible])[None].to(self._model.device)
            logits.append(self._model(input_ids=path, use_cache=False).logits[0, -1])
        return to_numpy(torch.stack(logits))

    def keep(self, store: PlainStore, first: int, rows: Sequence[int]) -> None:
        """Keep rows up to `first` and the given ones."""
        store.token_ids[first:] = [store.token_ids[row] for row in rows]

    def take(self, store: PlainStore, first: int, last: int) -> KvBlock:
        """Copy of rows, here token ids."""
        token_ids = array("I", store.token_ids[first:last])
        return KvBlock(token_ids, len(token_ids) * token_ids.itemsize)

    def put(self, store: PlainStore, block: KvBlock) -> None:
        """Append copied rows."""
        store.token_ids.extend(block.content)

    def search(self, store: PlainStore, search: WholeSearch) -> None:
        """None: searches are made step by step."""
