"""Hidden states between a model's layers, recorded while a pass wants them: by hooks, or by compiled layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from coppice.core.errors import IncompatibleError
from verifier_svc.extras.pruning.layers import decoder_layers

# Rows whose states are wanted, among so many rows of a layer's input.
Rows = Callable[[int], Tensor]


class ShownLayers(Protocol):
    """Replacement of the layers' forwards, which runs several of them in one call."""

    def show(self, layers: Sequence[int]) -> None:
        """Keep the inputs of these layers, or the output of the last, until the next call."""

    def take_shown(self) -> dict[int, Tensor]:
        """The kept states [1, N, h], by layer."""


class LayerStates:
    """Records the inputs of some of a model's layers, and the output of the last, inside a context."""

    def __init__(self, model: PreTrainedModel, layers: Sequence[int]) -> None:
        """State k of `layers` is the input of layer k, or the last layer's output.

        Raises:
            IncompatibleError: the model's layers are not found, or are fewer.
        """
        modules = decoder_layers(model)
        if not all(0 <= layer <= len(modules) for layer in layers):
            raise IncompatibleError(f"{type(model).__name__} has {len(modules)} layers, and no inputs of {layers}")
        self.layers = tuple(layers)
        self.calls: ShownLayers | None = None
        self._last: nn.Module = modules[-1]
        self._modules: dict[int, nn.Module] = {layer: modules[layer] for layer in self.layers if layer < len(modules)}
        self._num_layers = len(modules)
        self._handles: list[Any] = []
        self._seen: dict[int, Tensor] = {}

    def __enter__(self) -> LayerStates:
        self._seen = {}
        if self.calls is not None:
            self.calls.show(self.layers)
            return self
        for layer, module in self._modules.items():

            def note(_module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any], layer: int = layer) -> None:
                self._seen[layer] = inputs[0] if inputs else keywords["hidden_states"]

            self._handles.append(module.register_forward_pre_hook(note, with_kwargs=True))
        if self._num_layers in self.layers:
            self._handles.append(self._last.register_forward_hook(self._note_output))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self.calls is not None:
            self._seen = self.calls.take_shown()
            self.calls.show(())

    def of(self, rows: Rows) -> Tensor:
        """States of some rows, the layers' side by side [K, layers * hidden].

        Raises:
            IncompatibleError: the model does not call its layers as others do.
        """
        states, self._seen = self._seen, {}
        if len(states) < len(set(self.layers)) or any(
            state.dim() != 3 or state.shape[0] != 1 for state in states.values()
        ):
            raise IncompatibleError("the model does not call its layers as others do")
        picked = {layer: state[0].index_select(0, rows(state.shape[1])) for layer, state in states.items()}
        return torch.cat([picked[layer] for layer in self.layers], -1)

    def _note_output(self, _module: nn.Module, _inputs: tuple[Any, ...], output: Any) -> None:
        self._seen[self._num_layers] = output[0] if isinstance(output, tuple) else output
