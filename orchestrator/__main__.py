"""`python -m orchestrator`: one orchestrator, configured by environment variables."""

from __future__ import annotations

import os
import sys

from coppice.errors import CoppiceError, IncompatibleError
from coppice.logs import configure_logging
from coppice.rpc import run, stop_signal
from orchestrator.app import running
from orchestrator.config import Config

EXIT_UNAVAILABLE = 1
EXIT_MISCONFIGURED = 2


async def serve(config: Config) -> None:
    """Serve until the process is asked to stop."""
    async with running(config) as orchestrator:
        sys.stdout.write(f"ready {orchestrator.address}\n")
        sys.stdout.flush()
        await stop_signal()


def main() -> int:
    """Run the service; returns the exit code."""
    try:
        configure_logging(os.environ)
        config = Config.from_env(os.environ)
        run(lambda: serve(config))
    except (ValueError, IncompatibleError) as error:
        sys.stderr.write(f"orchestrator: {error}\n")
        return EXIT_MISCONFIGURED
    except CoppiceError as error:
        sys.stderr.write(f"orchestrator: {error}\n")
        return EXIT_UNAVAILABLE
    return 0


if __name__ == "__main__":
    sys.exit(main())
