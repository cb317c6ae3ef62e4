"""Functions of a model's own code with the same bits for a row at any place of its tensor.

Modules are replaced one by one (`even_activations.py`, `packed_layers.py`). Code that calls functions, such as a gate's
sigmoid or a router's product with a bare weight, is reached by intercepting the calls, which costs about a microsecond
for each call of torch. Only models with layer kinds of `verifier_svc.layers` are run in this way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from coppice.kernels.cpu.packed_linear import Product, packed_product
from verifier_svc.kernels.cpu.even_activations import evenly

# Elementwise functions that vector and scalar code round differently.
_ELEMENTWISE = (
    *(torch.sigmoid, Tensor.sigmoid, F.sigmoid, torch.tanh, Tensor.tanh, F.tanh),
    *(torch.exp, Tensor.exp, torch.log, Tensor.log, torch.log1p, Tensor.log1p),
    *(F.silu, F.gelu, F.softplus, F.logsigmoid),
)


class EvenFunctions(TorchFunctionMode):
    """Context in which elementwise functions are called without remainders, and bare weights are packed."""

    def __init__(self) -> None:
        super().__init__()
        self._products: dict[int, tuple[Tensor, Product | None]] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `func`, evenly where it is one of those."""
        named = kwargs or {}
        if func in _EVEN and args:
            return evenly(lambda values: func(values, *args[1:], **named), args[0])
        if func is F.linear and not named and len(args) == 2 and (product := self._product(args[1])) is not None:
            return product(args[0])
        return func(*args, **named)

    def _product(self, weight: Tensor) -> Product | None:
        """Packed product with a model's weight; the weight is kept, so that its id stays its own."""
        if id(weight) not in self._products:
            is_plain = type(weight) is torch.nn.Parameter and weight.dtype == torch.float32 and weight.dim() == 2
            product = packed_product(weight) if is_plain and weight.device.type == "cpu" else None
            self._products[id(weight)] = weight, product
        return self._products[id(weight)][1]


_EVEN = frozenset(_ELEMENTWISE)
