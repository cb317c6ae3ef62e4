"""The drafter of an EAGLE-3 head: see `coppice.draft_models.eagle`."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import torch

from coppice.core.feature_layers import MOST_PROMPT_FEATURES
from coppice.core.sampling import SamplingParams
from coppice.draft_models.coupling import ChildChoice
from coppice.draft_models.eagle.checkpoint import KIND, load_eagle
from coppice.draft_models.eagle.forward import choose_eagle_forward
from coppice.draft_models.eagle.sequence import EagleSequence, HeadSizes, LoadedHead
from coppice.draft_models.eagle.target_rows import read_target_rows
from coppice.search.tree_limits import TreeLimits
from drafter_svc.config import ON, DrafterConfig
from drafter_svc.drafters.base import DrafterInfo
from drafter_svc.model.checkpoint import choose_device, load_fingerprint
from drafter_svc.model.prefix_blocks import PrefixBlocks

logger = logging.getLogger(__name__)


def load(config: DrafterConfig) -> Eagle:
    """Load the configured checkpoint, and the target's tables that it leaves out.

    Raises:
        IncompatibleError: the device, checkpoint, target or tokenizer cannot be used.
        OSError, ValueError: a file cannot be read.
    """
    device = choose_device(config.device)
    torch.set_num_threads(config.num_threads)
    target = read_target_rows(config.target_model, logger.info) if config.target_model else None
    weights = load_eagle(config.model, target)
    info = DrafterInfo(
        kind=KIND,
        model=config.model,
        tokenizer_fingerprint=load_fingerprint(config.model if target is None else str(target.directory)),
        vocab_size=weights.vocab_size,
        max_length=0,
        feature_size=weights.feature_size,
        feature_layers=weights.feature_layers,
        max_prompt_features=MOST_PROMPT_FEATURES if weights.calibration.reads_prompt else 0,
        target_weights=weights.calibration.target,
        acceptance_by_rank=weights.calibration.acceptance_by_rank,
    )
    least = config.eagle_min_probability
    limits = TreeLimits(
        max_nodes=config.max_nodes,
        width=config.eagle_width,
        max_steps=config.eagle_depth - 1,
        max_depth=config.eagle_depth,
        min_step_gain=config.eagle_min_gain,
        min_path_log_prob=math.log(least) if least > 0 else -math.inf,
    )
    choice = ChildChoice(config.draft_children, config.coupling == ON)
    sizes = HeadSizes(weights.vocab_size, weights.feature_size)
    return Eagle(LoadedHead(choose_eagle_forward(weights, device), sizes, weights.calibration, limits, choice), info)


class Eagle:
    """A loaded drafter."""

    def __init__(self, head: LoadedHead, info: DrafterInfo) -> None:
        self.info = info
        # Rows of prompts are not shared.
        self.prefixes = PrefixBlocks(0)
        self._head = head

    def open(self, prompt: Sequence[int], sampling: SamplingParams, cache_salt: str = "") -> EagleSequence:
        """Open a sequence; the first draft needs the first token's features."""
        return self._head.open(prompt, sampling)

    def warm_up(self) -> None:
        """Draft some rounds, greedily and with noise, in one call and step by step."""
        self._head.warm_up()
