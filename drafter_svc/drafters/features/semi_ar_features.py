"""Semi-autoregressive drafts conditioned on the target's hidden states.

Trunk, masks and transition are a token-only drafter's. Heads on the target's latest state learn what to add to each
row before the output layer. Without a state, drafts are those of the trunk.
"""

from __future__ import annotations

from functools import partial

from coppice.core.errors import IncompatibleError
from drafter_svc.config import DrafterConfig
from drafter_svc.drafters.block.block_lm import BlockLm, load_block_lm
from drafter_svc.drafters.block.checkpoint import load_block_calibration
from drafter_svc.drafters.block.semi_ar import SemiAr
from drafter_svc.drafters.features.checkpoint import load_conditioning

KIND = "semi-ar-features"


def load(config: DrafterConfig) -> BlockLm:
    """Load the configured checkpoint and the trunk that it names.

    Raises:
        IncompatibleError: the device, tokenizer, calibration file, matrices or trunk cannot be used.
        OSError, ValueError: the checkpoint cannot be read.
    """
    calibration = load_block_calibration(config.model, KIND)
    conditioning = load_conditioning(config.model)
    if (num_heads := len(conditioning.matrices["up"])) != 1 + calibration.num_masks:
        raise IncompatibleError(f"{config.model} has {num_heads} heads, and {calibration.num_masks} masks")
    return load_block_lm(config, KIND, calibration, partial(SemiAr, most=config.semi_ar_masks), conditioning)
