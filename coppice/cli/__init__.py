"""The `coppice` command: one module per sub-command, heavy imports inside the commands that need them."""

import os

# gRPC's core, which reads it when it is imported, writes to stderr what its errors say, too.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
