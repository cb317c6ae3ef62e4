"""`python -m coppice.colocated`: all services in one process, configured by environment variables (see `config.py`)."""

from __future__ import annotations

import logging
import os
import sys

from coppice.core.errors import CoppiceError, IncompatibleError
from coppice.kernels.cpu.openmp import set_spin_count
from coppice.net.rpc import first_of, run, stop_signal
from coppice.obs.logs import configure_logging

logger = logging.getLogger(__name__)

EXIT_UNAVAILABLE = 1
EXIT_MISCONFIGURED = 2
# As in a verifier process.
EXIT_ENGINE_LOST = 4
# Event loop and model threads share the GIL; the default switch interval of 5 ms would delay messages.
SWITCH_INTERVAL_S = 1e-4


def main() -> int:
    """Run the deployment until SIGTERM; returns the exit status."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    # Before torch is imported.
    set_spin_count()
    from coppice.colocated.app import LoadedModels, load, running
    from coppice.colocated.config import ColocatedConfig

    async def serve(config: ColocatedConfig, models: LoadedModels) -> None:
        async with running(config, models) as deployment:
            sys.stdout.write(f"ready {deployment.orchestrator.address}\n")
            sys.stdout.flush()
            await first_of(stop_signal(), deployment.lost.wait())
            if deployment.lost.is_set():
                # No draining: sequences of that verifier would wait forever.
                logger.error("a verifier's model thread has ended, stopping the process")
                os._exit(EXIT_ENGINE_LOST)

    try:
        configure_logging(os.environ)
        config = ColocatedConfig.from_env(os.environ)
        models = load(config)
        run(lambda: serve(config, models))
    except (ValueError, OSError, IncompatibleError) as error:
        sys.stderr.write(f"colocated: {error}\n")
        return EXIT_MISCONFIGURED
    except CoppiceError as error:
        sys.stderr.write(f"colocated: {error}\n")
        return EXIT_UNAVAILABLE
    return 0


if __name__ == "__main__":
    sys.exit(main())
