"""Construction of the configured drafter."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib import import_module

from coppice.checkpoints.catalogue import local_model
from coppice.core.errors import UnsupportedError
from drafter_svc.config import DrafterConfig
from drafter_svc.drafters.base import Drafter
from drafter_svc.drafters.kinds import KINDS

logger = logging.getLogger(__name__)


def load_drafter(config: DrafterConfig) -> Drafter:
    """Load the configured drafter.

    Raises:
        UnsupportedError: the kind does not exist.
        IncompatibleError: the checkpoint cannot be used by this kind.
        OSError, ValueError: the checkpoint cannot be read.
    """
    if config.drafter_kind not in KINDS:
        known = ", ".join(sorted(KINDS))
        raise UnsupportedError(f"there is no drafter kind {config.drafter_kind!r}; there are: {known}")
    load: Callable[[DrafterConfig], Drafter] = import_module(KINDS[config.drafter_kind]).load
    return load(config.model_copy(update={"model": local_model(config.model, logger.info)}))
