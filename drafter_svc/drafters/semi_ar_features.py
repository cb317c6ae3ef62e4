"""Semi-autoregressive drafts that know the target's hidden states: form (b) of `semi_ar.py`.

Trunk, masks and transition are a token-only drafter's own; what the target's states add to the inputs is learned beside
them. Without states the drafts are that drafter's.
"""

from __future__ import annotations

from functools import partial

from coppice.errors import IncompatibleError
from drafter_svc.config import DrafterConfig
from drafter_svc.drafters.block_checkpoint import load_block_calibration
from drafter_svc.drafters.block_lm import BlockLm, load_block_lm
from drafter_svc.drafters.feature_checkpoint import load_feature_inputs, trunk_of
from drafter_svc.drafters.semi_ar import SemiAr

KIND = "semi-ar-features"


def load(config: DrafterConfig) -> BlockLm:
    """Load the configured checkpoint and the trunk that it names.

    Raises:
        IncompatibleError: the device, tokenizer, calibration file, matrices or trunk cannot be used.
        OSError, ValueError: the checkpoint cannot be read.
    """
    calibration = load_block_calibration(config.model, KIND)
    inputs = load_feature_inputs(config.model)
    if inputs.num_masks != calibration.num_masks:
        raise IncompatibleError(f"{config.model} adds to {inputs.num_masks} masks, and has {calibration.num_masks}")
    make = partial(SemiAr, most=config.semi_ar_masks)
    return load_block_lm(config, KIND, calibration, make, trunk_of(config.model), inputs)
