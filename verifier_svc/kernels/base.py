"""Interface of tree attention kernels. A kernel owns the keys and values of all layers."""

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
    """The kernel does not support the model; another one may."""


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """Softmax parameters of a layer; None for options that the model does not use.

    `sinks` [heads] are scores of keys without a value, `softcap` bounds scores by its tanh, `sliding_window` is the
    number of last positions that a row sees, `chunk` the size of the parts of a text within which it sees others.
    `slopes` [heads] times the distance of a key are subtracted from its score (ALiBi). With `rounds_biases` (Falcon)
    slopes times the position of a key, all in bfloat16, are added to its score before that is scaled.
    """

    scale: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    chunk: int | None = None
    slopes: Tensor | None = None
    rounds_biases: bool = False


class AttentionKernel(Protocol):
    """Paged keys and values, and attention over them."""

    @property
    def bytes_per_slot(self) -> int:
        """Bytes per token over all layers seen so far."""
        ...

    def allocate(self, num_blocks: int) -> None:
        """Allocate this many blocks, dropping contents; a layer's buffers are created at its first call."""
        ...

    def begin(self, plan: PassPlan, sources: IntArray, destinations: IntArray) -> None:
        """Begin a pass: move slots from `sources` to `destinations`; further calls belong to this plan."""
        ...

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        """Store a layer's new keys and values, and attend.

        Args:
            layer: index of the layer.
            query: [heads, N, dim], N including padding.
            key: [kv_heads, N, dim].
            value: [kv_heads, N, value_dim].
            rule: softmax parameters.

        Returns:
            [N, heads, value_dim]; rows of padding are finite.

        Raises:
            KernelLimitError: unsupported rule, dtype or device.
        """
        ...


class StaticKernel(AttentionKernel, Protocol):
    """A kernel for CUDA graphs: device operations of `attend` depend only on the layout."""

    @property
    def device(self) -> torch.device:
        """Device of the kernel's tensors."""
        ...

    def layout(self, plan: PassPlan) -> Hashable:
        """Key of passes for which `attend` reads the same addresses; `begin` fills those of its plan."""
        ...
