"""`python -m coppice.cli.tied_process PARENT_PID MODULE [ARGUMENT]…`: run a module that ends when its parent does.

The tie is made here, in the new process, because code between fork and exec would run gRPC's fork handlers, which
break a child whose parent is using gRPC.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
from collections.abc import Sequence

# What the line begins with in which a module says that it serves, and where.
READY = "ready "
_PR_SET_PDEATHSIG = 1


def main(parent_pid: int, module: str, arguments: Sequence[str] = ()) -> None:
    """Ask for SIGTERM at the parent's death, then become the module."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent_pid:  # it died before we could ask
            sys.exit(1)
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
