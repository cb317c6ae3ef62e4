"""An adapter in a target's forward: changes mask rows, and leaves all other rows bit-identical."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from coppice.core.errors import IncompatibleError
from coppice.kernels.cpu.half_tables import halves
from verifier_svc.extras.redraft.adapter import LowRank, SpaceAdapter
from verifier_svc.extras.redraft.low_rank import add_low_rank, put_inputs
from verifier_svc.kernels.cpu.packed_layers import PackedLinear

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]


class MaskRows:
    """Mask embeddings, and low-rank additions to layers, gated per row.

    Layers compute all rows as usual. On a CPU the additions to mask rows are then computed row by row, compiled;
    elsewhere for all rows, so that shapes depend on the number of rows only and passes can be captured in CUDA graphs.
    """

    def __init__(self, model: PreTrainedModel, adapter: SpaceAdapter) -> None:
        """Install an adapter in a model, whose layers must not be replaced afterwards.

        Raises:
            IncompatibleError: the adapter does not match the model.
        """
        parameter = next(model.parameters())
        self._embed: nn.Module = model.get_input_embeddings()
        self._table = adapter.masks.to(parameter.device, parameter.dtype)
        # During a forward with masks: the gate [N, 1], or indices of mask rows and the number of rows.
        self._gate: Tensor | None = None
        self._rows: IntArray | None = None
        self._num_rows = 0
        with torch.inference_mode():
            probe = self._embed(torch.zeros(1, dtype=torch.long, device=parameter.device))
        if probe.shape[-1] != self._table.shape[-1]:
            raise IncompatibleError(
                f"the adapter's masks have {self._table.shape[-1]} numbers, the target's embeddings {probe.shape[-1]}"
            )
        # torch's overhead exceeds small products.
        self._by_row = parameter.device.type == "cpu" and parameter.dtype == torch.float32
        # None for models whose embedding is not a plain table.
        self._embeddings: FloatArray | None = None
        if self._by_row and type(self._embed) is nn.Embedding and self._embed.max_norm is None:
            self._embeddings = self._embed.weight.detach().numpy()
        modules = dict(model.named_modules())
        for name, low_rank in adapter.low_rank.items():
            if (module := modules.get(name)) is None:
                raise IncompatibleError(f"the adapter is for a layer {name!r}, which the target does not have")
            _refuse_other_sizes(name, module, low_rank)
            if not self._by_row:
                module.register_forward_hook(self._hook(name, low_rank.to(parameter.device, parameter.dtype)))
                continue
            addition = self._addition(name, low_rank)
            if isinstance(module, PackedLinear):
                module.addition = addition
            else:
                module.register_forward_hook(lambda _, inputs, output, add=addition: add(inputs[0], output))

    def begin(self, token_ids: Tensor, mask_places: Tensor) -> Tensor:
        """Inputs [1, N, hidden] of the coming forward, from ids [1, N] and mask positions [N]; opens the gate."""
        if self._embeddings is not None:
            # Same rows without torch's overhead.
            own = torch.empty(1, len(mask_places), self._table.shape[1])
            arrays = token_ids.numpy()[0], mask_places.numpy(), self._embeddings, self._table.numpy()
            self._rows, self._num_rows = put_inputs(*arrays, own.numpy()[0]), len(mask_places)
            return own
        inputs: Tensor = self._embed(token_ids)
        if self._by_row:
            # A few rows, so no compiled function.
            rows, table = inputs.numpy()[0], self._table.numpy()
            places = {row: place for row, place in enumerate(mask_places.tolist()) if place >= 0}
            for row, place in places.items():
                rows[row] = table[place]
            self._rows, self._num_rows = np.array([*places], np.int64), len(rows)
            return inputs
        self._gate = mask_places[:, None] >= 0
        return torch.where(self._gate, self._table[mask_places.clamp_min(0)], inputs)

    def narrow(self, rows: Tensor) -> None:
        """Restrict the forward to some of its rows [M] from here on."""
        if self._rows is not None:
            is_mask = np.zeros(self._num_rows, np.bool_)
            is_mask[self._rows] = True
            self._rows, self._num_rows = np.flatnonzero(is_mask[rows.numpy()]), len(rows)
        if self._gate is not None:
            self._gate = self._gate.index_select(0, rows)

    def end(self) -> None:
        """End the forward: close the gate."""
        self._gate = self._rows = None

    def _addition(self, name: str, low_rank: LowRank) -> Callable[[Tensor, Tensor], None]:
        down, up = halves(low_rank.down.float().numpy()), halves(low_rank.up.T.float().numpy())
        width = down.shape[1]

        def add(values: Tensor, output: Tensor) -> None:
            rows = self._rows
            if rows is None:
                return
            inputs, result = values.numpy(), output.numpy()
            if inputs.size != self._num_rows * width or inputs.ndim > 3:
                raise _unknown_inputs(name, values)
            # Inputs are [1, N, width] or [N, width], depending on the model.
            if inputs.ndim == 3:
                inputs, result = inputs[0], result[0]
            add_low_rank(inputs, rows, down, up, result)

        return add

    def _hook(self, name: str, low_rank: LowRank) -> Any:
        down, up = low_rank.down, low_rank.up

        def add(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
            gate = self._gate
            if gate is None:
                return None
            values = inputs[0]
            if values.shape[-2] != len(gate) or values.shape[-1] != down.shape[1]:
                raise _unknown_inputs(name, values)
            return torch.where(gate, output + values @ down.T @ up.T, output)

        return add


def _refuse_other_sizes(name: str, module: nn.Module, low_rank: LowRank) -> None:
    """Raise IncompatibleError if an addition's sizes differ from its layer's, as far as these are known."""
    own: list[Any]
    added = [low_rank.up.shape[0], low_rank.down.shape[1]]
    if hasattr(module, "in_features"):
        own = [module.out_features, module.in_features]
    elif isinstance(weight := getattr(module, "weight", None), Tensor) and weight.dim() == 2:
        # GPT-2's weights are transposed.
        own = [weight.shape[1], weight.shape[0]]
    else:
        return
    if added != own:
        raise IncompatibleError(
            f"the adapter's addition to {name!r} is one of {added} outputs and inputs, the layer has {own}"
        )


def _unknown_inputs(name: str, values: Tensor) -> IncompatibleError:
    shape = tuple(values.shape)
    return IncompatibleError(f"the layer {name!r} has inputs of shape {shape}, which the adapter cannot act on")
