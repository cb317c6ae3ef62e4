"""The C allocator's free memory, given back to the system."""

from __future__ import annotations

import ctypes
import sys


def release_memory() -> None:
    """Return free memory to the system, which glibc does not do by itself; a no-op elsewhere."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
