"""Garbage collections that stop nothing: what a process has loaded is left out of them."""

from __future__ import annotations

import gc


def freeze_heap() -> None:
    """Collect garbage once, and never look again at what is there now.

    Half a million objects of torch and transformers are looked at in a full collection, which stops every thread for a
    quarter of a second, a pass and an event loop in the midst of them. For processes that have loaded what they need.
    """
    gc.collect()
    gc.freeze()
