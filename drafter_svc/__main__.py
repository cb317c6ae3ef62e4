"""`python -m drafter_svc`: one drafter, configured by environment variables (see `config.py`)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Callable
from functools import partial

from coppice import rpc
from coppice.certificates import Certificates, read_certificates
from coppice.errors import CoppiceError
from coppice.logs import configure_logging
from coppice.openmp import set_spin_count
from coppice.stream_observer import StreamObserver
from coppice.timeline import StreamTimeline, open_timeline
from coppice.tracing import Tracer, open_tracer
from coppice.v1 import drafter_pb2_grpc
from drafter_svc.config import DrafterConfig
from drafter_svc.drafters.base import Drafter
from drafter_svc.drafters.registry import load_drafter
from drafter_svc.model_thread import ModelThread
from drafter_svc.sequence_traces import SequenceTraces
from drafter_svc.service import SERVICE_NAME, DrafterService

logger = logging.getLogger(__name__)

UNAVAILABLE = 1
BAD_CONFIGURATION = 2
# The model thread and the event loop share the interpreter; a message must not wait 5 ms for its turn.
SWITCH_INTERVAL_S = 1e-4


def main(make_service: type[DrafterService] = DrafterService) -> int:
    """Run the service until SIGTERM; returns the exit status."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        configure_logging(os.environ)
        config = DrafterConfig.from_env(os.environ)
        certificates = read_certificates(config.tls, "TLS_")
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return BAD_CONFIGURATION
    # Before any thread starts: each inherits it.
    os.nice(config.niceness)
    set_threads(config.num_threads)
    try:
        drafter = load_drafter(config)
    except (CoppiceError, OSError, ValueError) as error:
        sys.stderr.write(f"MODEL {config.model!r} cannot be used: {error}\n")
        return BAD_CONFIGURATION
    try:
        tracer = open_tracer("coppice-drafter", os.environ)
        rpc.run(lambda: serve(config, drafter, certificates, tracer, make_service))
    except CoppiceError as error:
        sys.stderr.write(f"{error}\n")
        return UNAVAILABLE
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return BAD_CONFIGURATION
    return 0


def set_threads(num_threads: int) -> None:
    """Set what OpenMP reads when torch, which no module imported so far needs, is imported."""
    set_spin_count()
    os.environ["OMP_NUM_THREADS"] = str(num_threads)


async def serve(
    config: DrafterConfig,
    drafter: Drafter,
    certificates: Certificates | None = None,
    tracer: Tracer | None = None,
    make_service: type[DrafterService] = DrafterService,
) -> None:
    """Serve the drafter until SIGTERM, then drain."""
    thread = ModelThread()
    thread.start()
    server = rpc.Server([SERVICE_NAME], certificates)
    timeline = open_timeline("drafter", os.environ)
    observe: list[Callable[[], StreamObserver]] = []
    if tracer is not None:
        observe.append(partial(SequenceTraces, tracer, drafter.info.kind))
    if timeline is not None:
        observe.append(partial(StreamTimeline, timeline, "orchestrator"))
    service = make_service(drafter, thread, config.max_nodes, config.max_sequences, observe, timeline)
    drafter_pb2_grpc.add_DrafterServiceServicer_to_server(service, server.grpc)
    try:
        with _metrics(config, service, certificates):
            port = await server.start(config.listen_address, config.health_port)
            await _finished(thread, drafter.warm_up)
            await server.set_serving(True)
            print(f"ready {config.host}:{port}", flush=True)  # noqa: T201  who started us waits for this line
            await rpc.stop_signal()
    finally:
        await server.stop(config.grace_s)
        await asyncio.to_thread(thread.stop)
        if tracer is not None:
            await asyncio.to_thread(tracer.close)
        if timeline is not None:
            timeline.write()


def _metrics(
    config: DrafterConfig, service: DrafterService, certificates: Certificates | None
) -> contextlib.AbstractContextManager[None]:
    """Serves metrics until the context is left, where the settings ask for it."""
    if not config.metrics_port:
        return contextlib.nullcontext()
    # Here, so that nothing else pays for loading it.
    from coppice.telemetry import serving_metrics
    from drafter_svc.metrics import drafter_metrics

    return serving_metrics(lambda: drafter_metrics(service, certificates), config.listen_address, config.metrics_port)


async def _finished(thread: ModelThread, job: Callable[[], None]) -> None:
    """Run a job on the model thread and wait for it; its error is ours."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[None] = loop.create_future()

    def run() -> None:
        try:
            job()
        except BaseException as error:
            loop.call_soon_threadsafe(result.set_exception, error)
            raise
        loop.call_soon_threadsafe(result.set_result, None)

    thread.submit(run)
    await result


if __name__ == "__main__":
    sys.exit(main())
