"""The target's last hidden states: what its output layer is given, row by row, in passes in which somebody asks."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from coppice.core.errors import IncompatibleError


class RowStates:
    """Notes the inputs of a model's output layer while it is entered; at all other times the model is as it was."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._handle: Any = None
        self._seen: Tensor | None = None

    def __enter__(self) -> RowStates:
        layer = self._model.get_output_embeddings()
        if layer is not None:
            # Hooks run in order: behind the one that picks the rows of a pruned pass.
            self._handle = layer.register_forward_pre_hook(self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._handle is not None:
            self._handle.remove()

    def of(self, logit_rows: Tensor | None) -> Tensor:
        """States [K, hidden] of the forward's rows; all that the output layer has seen, without `logit_rows`.

        Raises:
            IncompatibleError: the model does not call its output layer as others do.
        """
        seen = self._seen
        if seen is None or seen.dim() != 3 or seen.shape[0] != 1:
            raise IncompatibleError(f"{type(self._model).__name__} does not call its output layer as others do")
        return seen[0] if logit_rows is None else seen[0].index_select(0, logit_rows)

    def _note(self, _module: object, inputs: tuple[Any, ...]) -> None:
        self._seen = inputs[0]
