"""Masked-diffusion drafts: a block of masks that see each other, denoised in one or several passes.

The prefix is causal and cached; only the block's rows see both sides, and they are dropped. **The row at position t
predicts the token at t + 1**, as in diffusion models derived from autoregressive ones (used by SpecDiff-2, Sandler et
al. 2511.00606): the last committed token predicts the block's first token.

With several passes, the tokens that the drafter is most certain of replace their masks, and the next pass sees them. A
node's probability is then conditional on these tokens: the tree is a hint, not a distribution.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from coppice.core.denoising import Denoising
from coppice.search.tree_limits import Children
from drafter_svc.config import DrafterConfig
from drafter_svc.drafters.block.block_lm import BlockLm, Look, load_block_lm
from drafter_svc.drafters.block.checkpoint import load_block_calibration

KIND = "diffusion"
# Tokens of a block that pay for their rows, as measured; models trained on longer blocks also fill shorter ones.
USUAL_BLOCK = 4


def load(config: DrafterConfig) -> BlockLm:
    """Load the configured checkpoint.

    Raises:
        IncompatibleError: the device, tokenizer or calibration file cannot be used.
        OSError, ValueError: the checkpoint cannot be read.
    """
    calibration = load_block_calibration(config.model, KIND)
    block = config.diffusion_block or min(calibration.block, USUAL_BLOCK)
    steps, max_steps = config.diffusion_steps, config.diffusion_max_steps
    make = partial(Diffusion, steps=steps, block=block, max_steps=max_steps)
    return load_block_lm(config, KIND, calibration, make)


@dataclass(frozen=True, slots=True)
class Diffusion:
    """`steps` passes over a block of `block` tokens; its last token predicts nothing and has no row."""

    sees_all: ClassVar[bool] = True
    mask_ids: tuple[int, ...]
    steps: int = 1
    block: int = 8
    # Limit on requested steps.
    max_steps: int = 8

    @property
    def max_masks(self) -> int:
        """Rows of a block."""
        return self.block - 1

    def num_masks(self, max_nodes: int) -> int:
        """The whole block for any number of nodes, as in training."""
        return self.max_masks

    def predict(self, look: Look, num_masks: int) -> list[Children]:
        """Children at each depth; those of an unmasked token are the ones it was chosen from."""
        block = [self.mask_ids[0]] * num_masks
        found = look(block)
        masked = list(range(num_masks))
        for steps_left in range(self.steps, 1, -1):
            # The row of block[i] holds the token at depth i, with children `found[i]`.
            chosen = sorted(masked, key=lambda i: -_confidence(found[i]))[: -(-len(masked) // steps_left)]
            chosen = [i for i in chosen if found[i].token_ids]
            if not chosen:
                break
            for i in chosen:
                block[i] = found[i].token_ids[0]
            masked = [i for i in masked if i not in chosen]
            seen = look(block)
            found = [seen[i] if i in masked or i == num_masks else found[i] for i in range(num_masks + 1)]
        return found

    def as_asked(self, denoising: Denoising) -> Diffusion:
        """With the request's steps, up to `max_steps`, and block size; 0 keeps the setting."""
        steps = min(denoising.steps, self.max_steps) or self.steps
        return replace(self, steps=steps, block=denoising.block_tokens or self.block)


def _confidence(children: Children) -> float:
    return children.log_probs[0] if children.log_probs else float("-inf")
