"""`python -m verifier_svc.model.parallel.tensor_worker RANK PARENT_PID SOCKET DIRECTORY`: follows rank 0.

Settings come from rank 0's environment. Ends with the socket, or when the parent is gone.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

from coppice.core.errors import CoppiceError
from coppice.obs.logs import configure_logging
from verifier_svc.config import CONFIGURATION_ERROR, VerifierConfig
from verifier_svc.model.checkpoint import CheckpointRefusedError
from verifier_svc.model.loading import load_probed_target
from verifier_svc.model.parallel.pass_message import decode
from verifier_svc.model.parallel.tensor_parallel import following
from verifier_svc.model.parallel.worker_processes import PassReader
from verifier_svc.model.target_model import TargetModel

logger = logging.getLogger("verifier_svc")

_PARENT_CHECK_S = 0.5


def main(rank: int, parent_pid: int, descriptor: int, directory: Path) -> None:
    """Load this rank's part and run the passes of rank 0."""
    # Signals to the process group are for rank 0, which drains and then closes the socket.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(parent_pid,), name="parent-watch", daemon=True).start()
    try:
        configure_logging(os.environ, rank)
        config = VerifierConfig.from_env()
        reader = PassReader(socket.socket(fileno=descriptor))
        with following(rank, directory, reader, config) as ranks:
            try:
                target, _ = load_probed_target(config, ranks)
            except CheckpointRefusedError:
                # Rank 0 found the same, reports it and ends.
                reader.next()
                sys.exit(CONFIGURATION_ERROR)
            follow(target, reader)
    except (CoppiceError, ValueError) as error:
        logger.error("%s", error)
        sys.exit(CONFIGURATION_ERROR)
    except (RuntimeError, OSError) as error:  # usually a rank that is gone
        logger.error("%s", error)
        sys.exit(1)


def follow(target: TargetModel, reader: PassReader) -> None:
    """Run the passes of rank 0 until it sends no more."""
    while (message := reader.next()) is not None:
        step = decode(message)
        target.run(step.plan, step.sources, step.destinations)


def _end_with(parent_pid: int) -> None:
    """End at once with the parent, since no rank can continue."""
    while os.getppid() == parent_pid:
        time.sleep(_PARENT_CHECK_S)
    os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
