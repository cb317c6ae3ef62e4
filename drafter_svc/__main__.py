"""`python -m drafter_svc`: one drafter, configured by environment variables (see `config.py`)."""

from __future__ import annotations

import logging
import os
import sys

from coppice.checkpoints.files import message_of, one_line
from coppice.core.errors import CoppiceError
from coppice.heap import limit_arenas, release_library_pages, release_memory
from coppice.kernels.cpu.openmp import set_spin_count
from coppice.memory_limit import check_memory
from coppice.net import rpc
from coppice.net.certificates import read_certificates
from coppice.obs.logs import configure_logging
from coppice.obs.otel import open_tracer
from drafter_svc.app import serve
from drafter_svc.config import DrafterConfig
from drafter_svc.drafters.registry import load_drafter

logger = logging.getLogger("drafter_svc")

UNAVAILABLE = 1
BAD_CONFIGURATION = 2
# Model thread and event loop share the GIL; the default switch interval of 5 ms would delay messages.
SWITCH_INTERVAL_S = 1e-4


def main() -> int:
    """Run the service until SIGTERM; returns the exit status."""
    limit_arenas()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        configure_logging(os.environ)
        config = DrafterConfig.from_env(os.environ)
        check_memory()
        certificates = read_certificates(config.tls, "TLS_")
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return BAD_CONFIGURATION
    # Before any thread starts: threads inherit it.
    os.nice(config.niceness)
    set_threads(config.num_threads)
    # Imported here, after settings and threads: it imports torch.
    from coppice.lean_torch import leave_out_compiler

    leave_out_compiler()
    try:
        drafter = load_drafter(config)
    except (CoppiceError, OSError, ValueError) as error:
        logger.error("MODEL %r cannot be used: %s", config.model, message_of(error))
        return BAD_CONFIGURATION
    except MemoryError as error:
        logger.error("no memory for MODEL %r (%s)", config.model, one_line(error))
        return BAD_CONFIGURATION
    release_memory()
    release_library_pages()
    try:
        tracer = open_tracer("coppice-drafter", os.environ)
        rpc.run(lambda: serve(config, drafter, certificates, tracer))
    except CoppiceError as error:
        logger.error("%s", error)
        return UNAVAILABLE
    except ValueError as error:
        logger.error("%s", error)
        return BAD_CONFIGURATION
    return 0


def set_threads(num_threads: int) -> None:
    """Set variables that OpenMP reads when torch is imported, which no module has done so far."""
    set_spin_count()
    os.environ["OMP_NUM_THREADS"] = str(num_threads)


if __name__ == "__main__":
    sys.exit(main())
