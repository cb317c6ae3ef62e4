"""Memory that the process no longer needs, given back to the system."""

from __future__ import annotations

import ctypes
import logging
import os
import sys

from coppice.kernels.cpu.compiler import COMPILATIONS

logger = logging.getLogger(__name__)

# Set for a process that has taken the place of one that compiled.
_STARTED_AGAIN = "COPPICE_STARTED_AGAIN"
# `coppice up` and other commands start services by this module.
_OF_A_COMMAND = "coppice.cli.tied_process"


def release_memory() -> None:
    """Return the C allocator's free memory, which glibc does not do by itself; a no-op elsewhere."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def start_again_if_compiled() -> None:
    """Replace a process that has compiled its kernels by one that reads them from disk; to be called before it serves.

    LLVM keeps hundreds of MiB of what it has compiled, which a pod would hold to its end. A process replaces itself
    once, and not as part of a command, whose first start should not take longer.
    """
    if not COMPILATIONS.num_kept or os.environ.get(_STARTED_AGAIN) or _OF_A_COMMAND in sys.orig_argv:
        return
    logger.info("%d functions are compiled: starting again without the compiler's memory", COMPILATIONS.num_kept)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.environ[_STARTED_AGAIN] = "1"
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
