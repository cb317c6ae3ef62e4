"""Early pruning by hooks in an unmodified model's forward: pruned rows are dropped after an early layer.

After the last layer, remaining rows return to their old indices, since some models give their output the shape of
their input; the output layer then computes only rows whose logits are needed. Hooks act only between `begin` and
`end`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from coppice.core.errors import IncompatibleError
from verifier_svc.engine.kv_cache import IntArray
from verifier_svc.engine.pass_plan import PassPlan
from verifier_svc.extras.pruning.head import EarlyHead
from verifier_svc.extras.pruning.rows import Candidates, candidates_of, surviving_rows, without_pruned
from verifier_svc.model.output_layer import OutputLayer, output_layer

# Called with the pruned pass and, for each of its M rows, the row's index among the N rows before.
Narrow = Callable[[PassPlan, Tensor], None]


@dataclass(slots=True)
class PrunedForward:
    """State of one forward with pruning.

    `plan` is the pass after pruning; `num_pruned` counts pruned nodes without masks. `kept` [M] are the remaining rows,
    padding included; None if none was pruned.
    """

    plan: PassPlan
    candidates: Candidates
    narrow: Narrow
    scores: Tensor | None = None
    kept: Tensor | None = None
    num_rows: int = 0
    num_pruned: int = 0
    # Arguments shared by later layers, by identity: the argument and its remaining rows.
    arguments: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


class PrunedLayers:
    """Hooks of one model for one head."""

    def __init__(self, model: PreTrainedModel, head: EarlyHead, row_multiple: int) -> None:
        """Install a head in a model, whose layers must not be replaced afterwards.

        Raises:
            IncompatibleError: the head does not match the model, or the model's layers are not found.
        """
        layers = decoder_layers(model)
        config = model.config.get_text_config()
        if not head.layer < len(layers):
            raise IncompatibleError(f"the early head acts after layer {head.layer}, the target has {len(layers)}")
        output = output_layer(model)
        if head.hidden_size != config.hidden_size or output.weight.shape[1] != head.hidden_size:
            raise IncompatibleError(
                f"the early head is for rows of {head.hidden_size} numbers, the target's have {config.hidden_size}"
            )
        parameter = next(model.parameters())
        self._device = parameter.device
        self._head, self._output = head.to(parameter.device, parameter.dtype), output
        self._row_multiple = row_multiple
        self._forward: PrunedForward | None = None
        layers[head.layer - 1].register_forward_hook(self._cut)
        for layer in layers[head.layer :]:
            layer.register_forward_pre_hook(self._narrow_arguments, with_kwargs=True)
        layers[-1].register_forward_hook(self._widen)
        model.get_output_embeddings().register_forward_pre_hook(self._pick_logit_rows)

    def begin(self, plan: PassPlan, narrow: Narrow, scores: Tensor | None = None) -> None:
        """Prune in the next forward, by `scores` [C] of the plan's candidates if given, else by the head's."""
        self._forward = PrunedForward(plan, candidates_of(plan), narrow, scores)

    def end(self) -> PrunedForward:
        """End the forward; returns its state."""
        forward, self._forward = self._forward, None
        if forward is None:
            raise RuntimeError("a forward ended that had not begun")
        return forward

    def _cut(self, _module: nn.Module, _inputs: object, output: Any) -> Any:
        forward = self._forward
        if forward is None:
            return None
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.dim() != 3 or hidden.shape[0] != 1:
            raise IncompatibleError(f"layers give hidden states of shape {tuple(hidden.shape)}, which cannot be pruned")
        plan, candidates = forward.plan, forward.candidates
        forward.num_rows = hidden.shape[1]
        scores = forward.scores
        if scores is None:
            scores = early_scores(self._head, self._output, hidden[0], candidates)
        rows = surviving_rows(plan, candidates, scores.cpu().numpy())
        left = without_pruned(plan, rows, self._row_multiple)
        # Dropping rows that padding adds again saves nothing.
        if len(left.token_ids) < hidden.shape[1]:
            forward.plan = left
            forward.num_pruned = int((~np.isin(candidates.rows, rows)).sum())
            padding = np.zeros(len(left.token_ids) - len(rows), np.int64)
            forward.kept = self._on_device(np.concatenate([rows, padding]))
            forward.narrow(left, forward.kept)
            hidden = hidden.index_select(1, forward.kept)
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    def _narrow_arguments(
        self, _module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        forward = self._forward
        if forward is None or forward.kept is None:
            return None
        # Hidden states, the first argument, have the remaining rows already.
        others = tuple(self._narrowed(argument, forward) for argument in arguments[1:])
        named = {
            name: value if name == "hidden_states" else self._narrowed(value, forward)
            for name, value in keywords.items()
        }
        return (*arguments[:1], *others), named

    def _narrowed(self, value: Any, forward: PrunedForward) -> Any:
        if isinstance(value, tuple):
            return tuple(self._narrowed(part, forward) for part in value)
        if (
            not isinstance(value, Tensor)
            or value.dim() < 2
            or value.shape[1] != forward.num_rows
            or value.shape[0] != 1
        ):
            return value
        assert forward.kept is not None
        if id(value) not in forward.arguments:
            forward.arguments[id(value)] = value, value.index_select(1, forward.kept)
        return forward.arguments[id(value)][1]

    def _widen(self, _module: nn.Module, _inputs: object, output: Any) -> Any:
        forward = self._forward
        if forward is None or forward.kept is None:
            return None
        hidden = output[0] if isinstance(output, tuple) else output
        wide = hidden.new_zeros(1, forward.num_rows, hidden.shape[-1])
        count = forward.plan.num_rows
        wide[:, forward.kept[:count]] = hidden[:, :count]
        return (wide, *output[1:]) if isinstance(output, tuple) else wide

    def _pick_logit_rows(self, _module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if self._forward is None:
            return None
        return (inputs[0].index_select(1, self.logit_rows(inputs[0].shape[1])), *inputs[1:])

    def logit_rows(self, num_rows: int) -> Tensor:
        """The running forward's logit rows [K] among all its rows, or among as many as remained."""
        forward = self._forward
        if forward is None:
            raise RuntimeError("no forward is running")
        rows = self._on_device(forward.plan.logit_rows)
        is_whole = forward.kept is not None and num_rows == forward.num_rows
        return forward.kept.index_select(0, rows) if is_whole and forward.kept is not None else rows

    def _on_device(self, array: IntArray) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def early_scores(head: EarlyHead, output: OutputLayer, hidden: Tensor, candidates: Candidates) -> Tensor:
    """Scores [C] of the candidates' tokens after their parents, from hidden states [N, hidden] after the head's layer.

    A parent's row is computed once for all of its children.
    """
    parents, places = np.unique(candidates.parent_rows, return_inverse=True)
    rows, children, token_ids = (
        torch.from_numpy(array.astype(np.int64)).to(hidden.device) for array in (parents, places, candidates.token_ids)
    )
    return output.scores(head.predict(hidden.index_select(0, rows)).index_select(0, children), token_ids)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Layers of a model in execution order.

    Raises:
        IncompatibleError: not found.
    """
    num_layers: int = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        if not isinstance(module, nn.ModuleList) or len(module) != num_layers:
            continue
        if all(any(hasattr(part, "layer_idx") for part in layer.modules()) for layer in module):
            return module
    raise IncompatibleError(f"{type(model).__name__} has no list of decoder layers, which early pruning needs")
