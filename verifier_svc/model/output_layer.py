"""Single rows of a target's own output layer: the scores of a few tokens, without those of the whole vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from coppice.core.errors import IncompatibleError


@dataclass(frozen=True, slots=True)
class OutputLayer:
    """Logits = cap(scale x (weight . row + bias)); `weight` [vocab, hidden], `bias` [vocab] or None.

    `softcap` bounds logits by its tanh.
    """

    weight: Tensor
    bias: Tensor | None
    scale: float
    softcap: float | None

    def scores(self, rows: Tensor, token_ids: Tensor) -> Tensor:
        """One score [C] for each row [C, hidden] and its token [C], in single precision."""
        return self.finish((rows.float() * self.weight.index_select(0, token_ids).float()).sum(-1), token_ids)

    def finish(self, products: Tensor, token_ids: Tensor) -> Tensor:
        """Scores [C] from the products [C] of rows with the weights of their tokens [C]."""
        if self.bias is not None:
            products = products + self.bias.index_select(0, token_ids).float()
        return self._finish(products)

    def all_scores(self, rows: Tensor) -> Tensor:
        """Scores of all tokens [..., vocab]."""
        return self._finish(torch.nn.functional.linear(rows, self.weight, self.bias))

    def _finish(self, products: Tensor) -> Tensor:
        logits = products * self.scale
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


def output_layer(model: PreTrainedModel) -> OutputLayer:
    """A model's output layer; whether its logits are just that is for a probe to say.

    Raises:
        IncompatibleError: it has none that is a plain matrix.
    """
    layer = model.get_output_embeddings()
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not weight.dtype.is_floating_point:
        raise IncompatibleError(f"{type(model).__name__} has no output layer that an early head can be scored against")
    bias = getattr(layer, "bias", None)
    config = model.config.get_text_config()
    # Cohere multiplies by one name, Granite divides by another.
    scale = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
    softcap = getattr(config, "final_logit_softcapping", None)
    return OutputLayer(weight.detach(), None if bias is None else bias.detach(), float(scale), softcap)
