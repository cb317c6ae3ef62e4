"""`python -m coppice.gateway`: a gateway, configured by environment variables."""

from __future__ import annotations

import os
import sys

from coppice.core.errors import CoppiceError
from coppice.gateway.app import running
from coppice.gateway.config import GatewayConfig
from coppice.net.rpc import run, stop_signal
from coppice.obs.logs import configure_logging

EXIT_UNAVAILABLE = 1
EXIT_MISCONFIGURED = 2


async def serve(config: GatewayConfig) -> None:
    """Serve until a stop signal."""
    async with running(config) as gateway:
        sys.stdout.write(f"ready {gateway.address}\n")
        sys.stdout.flush()
        await stop_signal()


def main() -> int:
    """Run the gateway; returns the exit code."""
    try:
        configure_logging(os.environ)
        config = GatewayConfig.from_env(os.environ)
        run(lambda: serve(config))
    except ValueError as error:
        sys.stderr.write(f"gateway: {error}\n")
        return EXIT_MISCONFIGURED
    except CoppiceError as error:
        sys.stderr.write(f"gateway: {error}\n")
        return EXIT_UNAVAILABLE
    return 0


if __name__ == "__main__":
    sys.exit(main())
