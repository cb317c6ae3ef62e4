"""Garbage collections that stop nothing: what a process has loaded is left out of them."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def frozen_heap() -> Iterator[None]:
    """Collect garbage once, and do not look again at what is there now while the context is open.

    Half a million objects of torch and transformers are looked at in a full collection, which stops every thread for a
    quarter of a second, a pass and an event loop in the midst of them. For processes that have loaded what they need.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        # Or nothing of it is taken down when the process ends, and libraries report leaks behind its last words.
        gc.unfreeze()
