"""Why a draft is of no use."""

from __future__ import annotations

# One that comes late: the committed tokens have left it, none is wanted, it was sampled, or rounds are synchronous. And
# one that comes early: nobody was told to draft ahead.
LEFT, UNWANTED, SAMPLED, MISSED, UNASKED = STALE = ("left", "unwanted", "sampled", "missed", "unasked")
