"""`python -m orchestrator`: an orchestrator, configured by environment variables."""

from __future__ import annotations

import asyncio
import os
import sys

from coppice.core.errors import CoppiceError, IncompatibleError, UnavailableError
from coppice.net.rpc import first_of, run, stop_signal
from coppice.obs.logs import configure_logging
from coppice.obs.otel import open_tracing
from coppice.obs.timeline import Timeline, open_timeline
from coppice.obs.tracing import Tracing
from orchestrator.app import running
from orchestrator.config import Config

EXIT_UNAVAILABLE = 1
EXIT_MISCONFIGURED = 2


async def serve(config: Config, tracing: Tracing | None, timeline: Timeline | None) -> None:
    """Serve until a stop signal.

    Raises:
        UnavailableError: verifiers were not reached in time, or serve another target by now.
    """
    async with running(config, tracing, timeline) as orchestrator:
        sys.stdout.write(f"ready {orchestrator.address}\n")
        sys.stdout.flush()
        await first_of(stop_signal(), orchestrator.verifiers.replaced())
    if tracing is not None:
        await asyncio.to_thread(tracing.tracer.close)
    if timeline is not None:
        timeline.write()
    if orchestrator.verifiers.is_replaced:
        raise UnavailableError("the verifiers serve another target now; the orchestrator has to be started again")


def main() -> int:
    """Run the service; returns the exit code."""
    try:
        configure_logging(os.environ)
        config = Config.from_env(os.environ)
        tracing = open_tracing("coppice-orchestrator", os.environ)
        timeline = open_timeline("orchestrator", os.environ)
        run(lambda: serve(config, tracing, timeline))
    except (ValueError, IncompatibleError) as error:
        sys.stderr.write(f"orchestrator: {error}\n")
        return EXIT_MISCONFIGURED
    except CoppiceError as error:
        sys.stderr.write(f"orchestrator: {error}\n")
        return EXIT_UNAVAILABLE
    return 0


if __name__ == "__main__":
    sys.exit(main())
