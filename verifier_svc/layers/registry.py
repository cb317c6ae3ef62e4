"""Kinds of recurrent layers, and their installation in a model."""

from __future__ import annotations

from typing import Any

from torch import nn

from verifier_svc.layers.gated_delta import GatedDelta
from verifier_svc.layers.kimi_delta import KimiDelta
from verifier_svc.layers.mamba import Mamba
from verifier_svc.layers.mamba2 import Mamba2
from verifier_svc.layers.recurrence import RecurrentLayer, RecurrentStates
from verifier_svc.layers.short_convolution import ShortConvolution

KINDS: tuple[type[RecurrentLayer], ...] = (ShortConvolution, GatedDelta, KimiDelta, Mamba, Mamba2)

# Attribute of a module that has its layer.
_LAYER = "coppice_layer"


def kind_of(module: nn.Module) -> type[RecurrentLayer] | None:
    """Kind of a recurrent layer's module; None for other modules."""
    return next((kind for kind in KINDS if type(module).__name__ in kind.modules), None)


def recurrent_modules(model: nn.Module) -> list[nn.Module]:
    """Modules of a model that are recurrent layers of a known kind."""
    return [module for module in model.modules() if kind_of(module) is not None]


def install_layers(model: nn.Module) -> RecurrentStates | None:
    """Let a model's recurrent layers compute the rows of passes; a no-op when repeated. None without such layers."""
    layers: list[RecurrentLayer] = []
    for module in recurrent_modules(model):
        layer: Any = getattr(module, _LAYER, None)
        if layer is None and (kind := kind_of(module)) is not None:
            layer = kind(module)
            setattr(module, _LAYER, layer)
        module.forward = layer.forward
        layers.append(layer)
    return RecurrentStates(layers) if layers else None


def uninstall_layers(model: nn.Module) -> None:
    """Let a model's recurrent layers compute as transformers does again."""
    for module in recurrent_modules(model):
        del module.forward
