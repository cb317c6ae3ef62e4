"""A target's output layer: scores of single tokens, and its input, the last hidden states of a pass."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Any

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
        """Scores [C] of one token [C] per row [C, hidden], in single precision."""
        products = (rows.float() * self.weight.index_select(0, token_ids).float()).sum(-1)
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
    """A model's output layer; that its logits are computed by it alone is left to probes.

    Raises:
        IncompatibleError: it is not a plain matrix.
    """
    layer = model.get_output_embeddings()
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not weight.dtype.is_floating_point:
        raise IncompatibleError(f"{type(model).__name__} has no output layer that an early head can be scored against")
    bias = getattr(layer, "bias", None)
    config = model.config.get_text_config()
    # Cohere multiplies, Granite divides.
    scale = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
    softcap = getattr(config, "final_logit_softcapping", None)
    return OutputLayer(weight.detach(), None if bias is None else bias.detach(), float(scale), softcap)


class RowStates:
    """Records the input of a model's output layer inside a context."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._handle: Any = None
        self._seen: Tensor | None = None

    def __enter__(self) -> RowStates:
        layer = self._model.get_output_embeddings()
        if layer is not None:
            # Hooks run in order: after the one that selects rows of a pruned pass.
            self._handle = layer.register_forward_pre_hook(self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._handle is not None:
            self._handle.remove()

    def of(self, logit_rows: Tensor | None) -> Tensor:
        """Hidden states [K, hidden] of the forward's rows; all rows seen by the output layer without `logit_rows`.

        Raises:
            IncompatibleError: the model does not call its output layer as others do.
        """
        seen = self._seen
        if seen is None or seen.dim() != 3 or seen.shape[0] != 1:
            raise IncompatibleError(f"{type(self._model).__name__} does not call its output layer as others do")
        return seen[0] if logit_rows is None else seen[0].index_select(0, logit_rows)

    def _note(self, _module: object, inputs: tuple[Any, ...]) -> None:
        self._seen = inputs[0]


class KeptBody:
    """Runs a model's body once inside a context: further forwards reuse its hidden states for other rows."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._body: Any = model.base_model
        self._before: Any = None

    def __enter__(self) -> KeptBody:
        self._before = vars(self._body).get("forward")
        forward = self._body.forward
        kept: list[Any] = []

        def once(*arguments: Any, **named: Any) -> Any:
            if not kept:
                kept.append(forward(*arguments, **named))
            return kept[0]

        self._body.forward = once
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is None:
            del self._body.forward
        else:
            self._body.forward = self._before
