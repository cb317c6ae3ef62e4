"""Drafter kinds and their modules, imported on use; each has `load(config) -> Drafter`."""

from __future__ import annotations

# A request uses one drafter per kind. Boosted small LMs, which complement each other, are kinds of their own so that a
# request can use all of them.
MAX_BOOSTED = 4
SMALL_LMS = ("small-lm", *(f"boost-{number}" for number in range(1, MAX_BOOSTED + 1)))
KINDS = {
    **dict.fromkeys(SMALL_LMS, "drafter_svc.drafters.small_lm.drafter"),
    "semi-ar": "drafter_svc.drafters.block.semi_ar",
    "diffusion": "drafter_svc.drafters.block.diffusion",
    "eagle": "drafter_svc.drafters.eagle.drafter",
}
