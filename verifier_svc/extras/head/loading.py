"""Loading a head for a target."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from coppice.core.errors import IncompatibleError
from coppice.core.feature_layers import MOST_PROMPT_FEATURES
from coppice.draft_models.eagle.checkpoint import load_eagle
from coppice.draft_models.eagle.forward import choose_eagle_forward
from coppice.draft_models.eagle.sequence import HeadSizes, LoadedHead
from coppice.draft_models.eagle.target_rows import TargetRows, read_target_rows
from coppice.search.tree_limits import TreeLimits
from coppice.usable_cores import usable_cores
from verifier_svc.config import VerifierConfig
from verifier_svc.engine.features import FeatureShape
from verifier_svc.extras.head.head import HeadSettings

logger = logging.getLogger(__name__)

# As many nodes as a pass has nearly for free, see panel_products.py.
_MOST_NODES = 11
# As drafters of this kind have them by default.
_LIMITS = TreeLimits(
    _MOST_NODES, width=8, max_steps=6, max_depth=7, min_step_gain=0.1, min_path_log_prob=math.log(0.01)
)


def load_own_head(
    config: VerifierConfig,
    model: PreTrainedModel,
    vocab_size: int,
    features: FeatureShape,
    weights: str,
    clock: Callable[[], float] = time.perf_counter,
) -> HeadSettings | None:
    """The head of `config` for a target with these features and weights fingerprint; None if none is configured.

    Raises:
        IncompatibleError: the checkpoint is damaged or for another target, or the target gives no features of these
            layers.
    """
    if not config.eagle_head:
        return None
    head = load_eagle(config.eagle_head, target_rows(model, config.model))
    if head.vocab_size != vocab_size or (head.calibration.target and head.calibration.target != weights):
        raise IncompatibleError(f"EAGLE_HEAD: {config.eagle_head} was made for another target")
    if (head.feature_layers, head.feature_size) != (features.layers, features.size):
        raise IncompatibleError(
            f"EAGLE_HEAD: {config.eagle_head} needs states of the layers {list(head.feature_layers)}, and the target "
            f"gives those of {list(features.layers)}"
        )
    sizes = HeadSizes(vocab_size, head.feature_size)
    own = LoadedHead(choose_eagle_forward(head, torch.device("cpu")), sizes, head.calibration, _LIMITS)
    own.warm_up()
    most = MOST_PROMPT_FEATURES if head.calibration.reads_prompt else 0
    logger.info("a head drafts up to %d nodes in this process", min(_MOST_NODES, config.max_nodes))
    num_threads = config.threads or usable_cores()
    return HeadSettings(own, min(_MOST_NODES, config.max_nodes), most, num_threads, clock=clock)


def target_rows(model: PreTrainedModel, reference: str) -> TargetRows:
    """Tables of a loaded target, without a copy where it holds both in bfloat16; else read from its checkpoint.

    Raises:
        IncompatibleError: the checkpoint has no such tables.
    """
    layers: tuple[Any, Any] = model.get_input_embeddings(), model.get_output_embeddings()
    tables: list[Any] = [getattr(layer, "weight", None) for layer in layers]
    if not all(isinstance(table, Tensor) and _is_half(table) for table in tables):
        return read_target_rows(reference, logger.info)
    embedding, output = (table.detach() for table in tables)
    return TargetRows(Path(reference), embedding, output, model.config.get_text_config().num_hidden_layers)


def _is_half(table: Tensor) -> bool:
    return table.dtype == torch.bfloat16 and table.device.type == "cpu"
