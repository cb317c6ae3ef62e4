"""The token-only drafter whose layers a feature-conditioned one is trained on top of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from coppice.errors import IncompatibleError
from drafter_svc.drafters.block_checkpoint import BlockCalibration, load_block_calibration
from drafter_svc.drafters.block_transition import transition_matrices
from drafter_svc.drafters.checkpoint import load_model
from drafter_svc.drafters.semi_ar import KIND
from drafter_svc.training.block_model import block_logits
from training.block_layout import BlockLayout
from training.transition import TrainedTransition


@dataclass(frozen=True, slots=True)
class Trunk:
    """A drafter of the kind semi-ar: its model in single precision, with a `transition` if it has one, and masks."""

    model: LlamaForCausalLM
    calibration: BlockCalibration

    @property
    def masks(self) -> Tensor:
        """The ids of its masks [K], which fill a block in order."""
        size: int = self.model.config.vocab_size
        return torch.arange(size - self.calibration.num_masks, size)

    def logits(self, runner: nn.Module, layout: BlockLayout, token_ids: Tensor, **others: Tensor) -> Tensor:
        """Scores of all tokens at every place of the layout's blocks, by the model or one that is made of it."""
        groups = self.masks.expand(len(token_ids), len(layout.anchors), -1)
        return block_logits(runner, layout, token_ids, groups, **others)[..., : self.masks[0]]


def load_trunk(directory: Path, vocab_size: int) -> Trunk:
    """Load one for a target with this vocabulary.

    Raises:
        IncompatibleError: it is no semi-ar drafter, or one for another vocabulary.
        OSError, ValueError: it cannot be read.
    """
    calibration = load_block_calibration(str(directory), KIND)
    model = load_model(str(directory), torch.device("cpu"))
    if not isinstance(model, LlamaForCausalLM):
        raise IncompatibleError(f"{directory} is a {type(model).__name__}; trunks are Llamas")
    if model.config.vocab_size - calibration.num_masks != vocab_size:
        known = model.config.vocab_size - calibration.num_masks
        raise IncompatibleError(f"{directory} has {known} tokens and the target {vocab_size}")
    if (matrices := transition_matrices(str(directory))) is not None:
        before, behind = matrices
        transition = TrainedTransition(model, len(before), torch.Generator(), vocab_size)
        transition.load_state_dict({"before": torch.from_numpy(before), "behind": torch.from_numpy(behind)})
        model.transition = transition
    return Trunk(model, calibration)
