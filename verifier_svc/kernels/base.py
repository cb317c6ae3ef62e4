"""The interface of tree attention kernels. A kernel owns the keys and values of all layers."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from coppice.core.errors import IncompatibleError
from verifier_svc.engine.kv_cache import IntArray
from verifier_svc.engine.pass_plan import PassPlan


class KernelLimitError(IncompatibleError):
    """This kernel cannot compute what the model asks for; another one may."""


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """How a layer turns scores into weights: what is beside plain softmax is None where the model has none of it.

    `sinks` [heads] are scores of keys without a value, `softcap` bounds scores by its tanh, `sliding_window` is how
    many of the last positions a row sees.
    """

    scale: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


class AttentionKernel(Protocol):
    """Keys and values in slots, and attention over them."""

    @property
    def bytes_per_slot(self) -> int:
        """Bytes that one token takes over all layers seen so far."""
        ...

    def allocate(self, num_blocks: int) -> None:
        """Start over with room for this many blocks; a layer's buffers are made at its first call."""
        ...

    def begin(self, plan: PassPlan, sources: IntArray, destinations: IntArray) -> None:
        """The next calls belong to this plan; before, slots move from `sources` to `destinations`."""
        ...

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        """Store a layer's new keys and values, and attend.

        Args:
            layer: the layer's number.
            query: [heads, N, dim], N including padding.
            key: [kv_heads, N, dim].
            value: [kv_heads, N, value_dim].
            rule: how.

        Returns:
            [N, heads, value_dim]; rows of padding are finite.

        Raises:
            KernelLimitError: the kernel does not know this rule or this kind of tensor.
        """
        ...


class StaticKernel(AttentionKernel, Protocol):
    """A kernel whose passes can be recorded: what `attend` does on the device follows from the layout alone."""

    @property
    def device(self) -> torch.device:
        """Where the kernel's tensors are."""
        ...

    def layout(self, plan: PassPlan) -> Hashable:
        """What tells passes apart that `attend` reads from different addresses; `begin` fills those of its plan."""
        ...
