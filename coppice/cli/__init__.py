"""The `coppice` command: one module per sub-command, heavy imports inside the commands that need them."""

import os
import sys
from types import TracebackType

# gRPC's core, which reads it when it is imported, writes to stderr what its errors say, too.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def _end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """End with the code of Ctrl-C and no traceback, also while modules are still being imported."""
    if issubclass(kind, KeyboardInterrupt):
        raise SystemExit(130)
    sys.__excepthook__(kind, error, trace)


sys.excepthook = _end
