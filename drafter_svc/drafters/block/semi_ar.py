"""Semi-autoregressive drafts: the small LM's trunk, and masks after the last committed token, in one pass.

As in SPACE (Yi et al. 2402.11809) and PARD (2504.18583) a mask stands for an undrawn token, and **the row at position
t predicts the token at t + 1**: the last committed token predicts the next one as usual, the first mask the one after
that. A mask sees the committed tokens and the masks before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from coppice.core.denoising import Denoising
from coppice.search.tree_limits import Children
from drafter_svc.config import DrafterConfig
from drafter_svc.drafters.block.block_lm import BlockLm, Look, load_block_lm
from drafter_svc.drafters.block.checkpoint import load_block_calibration

KIND = "semi-ar"


def load(config: DrafterConfig) -> BlockLm:
    """Load the configured checkpoint.

    Raises:
        IncompatibleError: the device, tokenizer or calibration file cannot be used.
        OSError, ValueError: the checkpoint cannot be read.
    """
    calibration = load_block_calibration(config.model, KIND)
    return load_block_lm(config, KIND, calibration, partial(SemiAr, most=config.semi_ar_masks))


@dataclass(frozen=True, slots=True)
class SemiAr:
    """One pass over as many masks as the tree may be deep, each with the embedding of its position in the block.

    `most` limits their number; 0: no limit.
    """

    sees_all: ClassVar[bool] = False
    mask_ids: tuple[int, ...]
    most: int = 0

    @property
    def max_masks(self) -> int:
        """Trained masks, limited by `most`."""
        return min(self.most or len(self.mask_ids), len(self.mask_ids))

    def num_masks(self, max_nodes: int) -> int:
        """Masks for the deepest possible tree; a mask does not see later ones, so fewer change nothing."""
        return min(self.max_masks, max_nodes - 1)

    def predict(self, look: Look, num_masks: int) -> list[Children]:
        """Children at each depth."""
        return look(self.mask_ids[:num_masks])

    def as_asked(self, denoising: Denoising) -> SemiAr:
        """Unchanged: nothing is denoised."""
        return self
