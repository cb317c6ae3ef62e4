"""Which drafter kinds there are. A kind is a module with `load(config) -> Drafter`, imported only when asked for."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

from coppice.core.errors import UnsupportedError

if TYPE_CHECKING:
    from drafter_svc.config import DrafterConfig
    from drafter_svc.drafters.base import Drafter

# A request has one drafter of a kind. Small LMs that were boosted to add to each other are kinds of their own, so that
# it can have all of them; so are the two forms of semi-autoregressive drafters.
MAX_BOOSTED = 4
SMALL_LMS = ("small-lm", *(f"boost-{number}" for number in range(1, MAX_BOOSTED + 1)))
KINDS = {
    **dict.fromkeys(SMALL_LMS, "drafter_svc.drafters.small_lm.drafter"),
    "semi-ar": "drafter_svc.drafters.block.semi_ar",
    "semi-ar-features": "drafter_svc.drafters.features.semi_ar_features",
    "diffusion": "drafter_svc.drafters.block.diffusion",
}


def load_drafter(config: DrafterConfig) -> Drafter:
    """Build the drafter that the configuration names.

    Raises:
        UnsupportedError: there is no such kind.
        IncompatibleError: the checkpoint cannot be used by this kind.
        OSError, ValueError: the checkpoint cannot be read.
    """
    if config.drafter_kind not in KINDS:
        known = ", ".join(sorted(KINDS))
        raise UnsupportedError(f"there is no drafter kind {config.drafter_kind!r}; there are: {known}")
    load: Callable[[DrafterConfig], Drafter] = import_module(KINDS[config.drafter_kind]).load
    return load(config)
