"""Exemption of loaded objects from garbage collection."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def frozen_heap() -> Iterator[None]:
    """Collect garbage once, and exempt all present objects from collection while the context is open.

    A full collection scans half a million objects of torch and transformers and stops all threads for a quarter of a
    second. For processes that have loaded everything they need.
    """
    gc.collect()
    gc.freeze()
    # The next full collection waits until objects that are a quarter of those of the last one have come. Of those that
    # are exempt there may be a million, and garbage would pile up for as long; after this one there are next to none.
    gc.collect()
    try:
        yield
    finally:
        # Otherwise these objects are not freed at exit, and libraries report leaks.
        gc.unfreeze()
