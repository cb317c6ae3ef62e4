"""The token-only drafter that heads on the target's hidden states correct: its rows, and its scores from them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutput

from coppice.core.errors import IncompatibleError
from coppice.training.block_layout import BlockLayout
from coppice.training.loop import training_dtype
from coppice.training.transition import TrainedTransition, even_rows
from drafter_svc.drafters.block.checkpoint import BlockCalibration, load_block_calibration
from drafter_svc.drafters.block.semi_ar import KIND
from drafter_svc.drafters.block.transition import transition_matrices
from drafter_svc.model.checkpoint import load_model
from drafter_svc.training.block_model import with_transition


@dataclass(frozen=True, slots=True)
class Trunk:
    """A drafter of the kind semi-ar: its model in single precision, with a `transition` if it has one, and masks.

    Axes as `BlockLayout` has them, and H numbers of a row before the output layer.
    """

    model: LlamaForCausalLM
    calibration: BlockCalibration

    @property
    def vocab_size(self) -> int:
        """Tokens, without masks."""
        return len(self.embeddings) - self.calibration.num_masks

    @property
    def embeddings(self) -> Tensor:
        """Embeddings of tokens and masks."""
        embed: Any = self.model.get_input_embeddings()
        table: Tensor = embed.weight.detach()
        return table

    @property
    def table(self) -> Tensor:
        """The output layer's rows for tokens [V, H]."""
        table: Tensor = self.model.lm_head.weight.detach()
        return table[: self.vocab_size]

    @torch.no_grad()
    def rows(self, layout: BlockLayout, token_ids: Tensor) -> Tensor:
        """Inputs of the output layer for the layout's blocks [R, G, 1 + K, H]."""
        masks = torch.arange(self.vocab_size, len(self.embeddings)).expand(len(token_ids), len(layout.anchors), -1)
        dtype = training_dtype()
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            return layout.run(_Rows(self.model), token_ids, masks).float()

    def logits(self, layout: BlockLayout, token_ids: Tensor, rows: Tensor) -> Tensor:
        """Scores of all tokens [R, G, 1 + K, V] from such rows."""
        return with_transition(self.model, layout, token_ids, rows @ self.table.T)

    def inputs(self, layout: BlockLayout, token_ids: Tensor, features: Tensor) -> Tensor:
        """Inputs of the heads after each anchor [R, G, D]: feature, then token; zeros without a feature."""
        own = features[:, layout.anchors].float()
        tokens = even_rows(self.embeddings[token_ids[:, layout.anchors]])
        return torch.cat([even_rows(own), tokens], -1) * (own != 0).any(-1, keepdim=True)


class _Rows(nn.Module):
    """A causal language model whose output layer leaves its inputs as they are."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self._model = model

    def forward(self, logits_to_keep: Tensor, **inputs: Any) -> CausalLMOutput:
        return CausalLMOutput(logits=self._model.model(**inputs).last_hidden_state[:, logits_to_keep])


def load_trunk(directory: Path, vocab_size: int) -> Trunk:
    """Load one for a target with this vocabulary.

    Raises IncompatibleError if it is no semi-ar drafter, or one for another vocabulary. Raises OSError or ValueError if
    it cannot be read.
    """
    calibration = load_block_calibration(str(directory), KIND)
    model = load_model(str(directory), torch.device("cpu"))
    if not isinstance(model, LlamaForCausalLM):
        raise IncompatibleError(f"{directory} is a {type(model).__name__}; trunks are Llamas")
    trunk = Trunk(model, calibration)
    if trunk.vocab_size != vocab_size:
        raise IncompatibleError(f"{directory} has {trunk.vocab_size} tokens and the target {vocab_size}")
    if (matrices := transition_matrices(str(directory))) is not None:
        before, behind = matrices
        model.transition = TrainedTransition(model, len(before), torch.Generator(), vocab_size)
        state = {"before": torch.from_numpy(before), "behind": torch.from_numpy(behind)}
        model.transition.load_state_dict(state)
    return Trunk(model.requires_grad_(False), calibration)
