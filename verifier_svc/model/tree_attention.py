"""Tree attention: the attention function that an unmodified Hugging Face model calls in every layer.

It owns the keys and values (the model runs with `use_cache=False`), stores each pass's rows in the paged cache and
lets every row attend to its committed context and its ancestors (SpecInfer, section 3.2).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from coppice.core.errors import IncompatibleError
from verifier_svc.engine.kv_cache import IntArray
from verifier_svc.engine.pass_plan import PassPlan
from verifier_svc.kernels.base import AttentionKernel, AttentionRule
from verifier_svc.layers.attention_traits import AttentionTraits

# Tensors passed by models that plain softmax attention does not need: positions are in the plan.
_IGNORED_TENSORS = frozenset({"position_ids", "cache_position", "position_embeddings", "attention_mask"})
_names = itertools.count()
_NO_SLOTS: IntArray = np.empty(0, np.int64)


class TreeAttention:
    """One model's attention, computed by a kernel."""

    def __init__(self, kernel: AttentionKernel, traits: Mapping[int, AttentionTraits]) -> None:
        """`traits` are those of layers that have any."""
        self.kernel = kernel
        self._traits = traits
        self._positions = _NO_SLOTS
        self._in_pass = False
        # transformers looks attention functions up by name; every instance has its own.
        self.name = f"coppice_tree_{next(_names)}"
        AttentionInterface.register(self.name, self._attend)

    def begin(self, plan: PassPlan, sources: IntArray, destinations: IntArray) -> None:
        """Begin a forward of this plan, after moving slots from `sources` to `destinations`."""
        self.kernel.begin(plan, sources, destinations)
        self._positions = plan.positions
        self._in_pass = True

    def narrow(self, plan: PassPlan) -> None:
        """From the next layer on, restrict the forward to this plan's rows, without moves."""
        self.kernel.begin(plan, _NO_SLOTS, _NO_SLOTS)
        self._positions = plan.positions

    def end(self) -> None:
        """End the forward."""
        self._in_pass = False

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
            IncompatibleError: the model needs something that no kernel supports.
        """
        _refuse_unknown(others, dropout)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        layer: int = module.layer_idx  # type: ignore[assignment]
        chunk = None
        if (traits := self._traits.get(layer)) is not None:
            chunk = traits.chunk
            query = traits.scaled(query, torch.from_numpy(self._positions).to(query.device))
        rule = AttentionRule(scale, sliding_window, softcap, s_aux, chunk)
        return self.attend(layer, query[0], key[0], value[0], rule)[None], None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        """`query` [heads, N, dim], `key` and `value` [kv_heads, N, dim] to [N, heads, dim].

        Raises:
            IncompatibleError: not within a pass.
        """
        if not self._in_pass:
            raise IncompatibleError("the model called tree attention outside a pass")
        return self.kernel.attend(layer, query, key, value, rule)


def _refuse_unknown(others: dict[str, Any], dropout: float) -> None:
    if dropout:
        raise IncompatibleError("the model applies dropout while serving")
    for name, value in others.items():
        if isinstance(value, Tensor) and name not in _IGNORED_TENSORS:
            raise IncompatibleError(f"the model's attention needs {name!r}, which is not supported")
