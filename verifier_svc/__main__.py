"""`python -m verifier_svc`: the verifier process, configured by environment variables (see config.py)."""

from __future__ import annotations

import logging
import os
import sys

from coppice.heap import limit_arenas
from coppice.kernels.cpu.openmp import set_spin_count
from coppice.memory_limit import check_memory
from coppice.net.certificates import Certificates, read_certificates
from coppice.obs.logs import configure_logging
from verifier_svc.config import CONFIGURATION_ERROR, VerifierConfig

logger = logging.getLogger("verifier_svc")


def main() -> None:
    """Read settings, set the OpenMP variables that torch reads at import, and run the verifier."""
    limit_arenas()
    config, certificates = read_settings()
    set_spin_count()
    # Imported here: it takes seconds, and errors in settings should be reported at once.
    from coppice.lean_torch import leave_out_compiler

    if config.tensor_parallel == 1:
        leave_out_compiler()
    from verifier_svc.app import run_verifier

    run_verifier(config, certificates)


def read_settings() -> tuple[VerifierConfig, Certificates | None]:
    """Settings and certificates from the environment; exits with an error if they or the memory do not do."""
    try:
        configure_logging(os.environ)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(CONFIGURATION_ERROR)
    try:
        config = VerifierConfig.from_env()
        check_memory()
        return config, read_certificates(config.tls, "TLS_")
    except ValueError as error:
        logger.error("%s", error)
        sys.exit(CONFIGURATION_ERROR)


if __name__ == "__main__":
    main()
