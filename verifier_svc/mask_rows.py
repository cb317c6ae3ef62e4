"""An adapter at work in a target's forward: it acts on mask rows, and leaves every bit of all other rows as it is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from coppice.errors import IncompatibleError
from verifier_svc.space_adapter import LowRank, SpaceAdapter


class MaskRows:
    """Mask embeddings, and low-rank additions to layers, behind a gate per row. Without masks the gate is shut.

    Every layer computes all rows as ever; then mask rows are replaced by theirs. Shapes depend on the number of rows
    alone, so that a pass can be recorded.
    """

    def __init__(self, model: PreTrainedModel, adapter: SpaceAdapter) -> None:
        """Install an adapter in a model, whose layers are not replaced any more.

        Raises:
            IncompatibleError: the adapter is not one for this model.
        """
        parameter = next(model.parameters())
        self._embed: nn.Module = model.get_input_embeddings()
        self._table = adapter.masks.to(parameter.device, parameter.dtype)
        self._gate: Tensor | None = None
        with torch.inference_mode():
            probe = self._embed(torch.zeros(1, dtype=torch.long, device=parameter.device))
        if probe.shape[-1] != self._table.shape[-1]:
            raise IncompatibleError(
                f"the adapter's masks have {self._table.shape[-1]} numbers, the target's embeddings {probe.shape[-1]}"
            )
        modules = dict(model.named_modules())
        for name, low_rank in adapter.low_rank.items():
            if (module := modules.get(name)) is None:
                raise IncompatibleError(f"the adapter is for a layer {name!r}, which the target does not have")
            module.register_forward_hook(self._hook(name, low_rank.to(parameter.device, parameter.dtype)))

    def begin(self, token_ids: Tensor, mask_places: Tensor) -> Tensor:
        """Inputs [1, N, hidden] of the coming forward, from ids [1, N] and places of masks [N]; opens the gate."""
        self._gate = mask_places[:, None] >= 0
        masks = self._table[mask_places.clamp_min(0)]
        return torch.where(self._gate, masks, self._embed(token_ids))

    def narrow(self, rows: Tensor) -> None:
        """From here on the forward has some of its rows [M] alone."""
        if self._gate is not None:
            self._gate = self._gate.index_select(0, rows)

    def end(self) -> None:
        """The forward is over."""
        self._gate = None

    def _hook(self, name: str, low_rank: LowRank) -> Any:
        def add(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
            gate = self._gate
            if gate is None:
                return None
            if inputs[0].shape[-2] != len(gate) or inputs[0].shape[-1] != low_rank.down.shape[1]:
                raise IncompatibleError(
                    f"the layer {name!r} has inputs of shape {tuple(inputs[0].shape)}, which the adapter cannot act on"
                )
            change = F.linear(F.linear(inputs[0], low_rank.down), low_rank.up)
            return torch.where(gate, output + change, output)

        return add
