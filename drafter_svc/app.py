"""Construction of a drafter: model thread and server, start and stop."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from functools import partial

from coppice.net import rpc
from coppice.net.certificates import Certificates
from coppice.net.stream_observer import StreamObserver
from coppice.obs.timeline import StreamTimeline, Timeline, open_timeline
from coppice.obs.tracing import Tracer
from coppice.v1 import drafter_pb2_grpc
from coppice.wire.message_sizes import SizeChecks
from drafter_svc.acceptance_map import AcceptanceMap
from drafter_svc.config import ON, DrafterConfig
from drafter_svc.drafters.base import Drafter
from drafter_svc.model.cache_budget import CacheBudget
from drafter_svc.model.model_thread import ModelThread
from drafter_svc.sequence_traces import sequence_traces
from drafter_svc.service import MAX_REQUEST_BYTES, REQUEST_SIZES, SERVICE_NAME, DrafterService


def new_service(
    config: DrafterConfig,
    drafter: Drafter,
    thread: ModelThread,
    tracer: Tracer | None = None,
    timeline: Timeline | None = None,
) -> DrafterService:
    """Service on a running model thread."""
    observe: list[Callable[[], StreamObserver]] = []
    if tracer is not None:
        observe.append(partial(sequence_traces, tracer, drafter.info.kind))
    if timeline is not None:
        observe.append(partial(StreamTimeline, timeline, "orchestrator"))
    acceptance = AcceptanceMap(is_applied=config.online_calibration == ON)
    caches = CacheBudget(config.max_cached_tokens)
    limits = (config.max_nodes, config.max_sequences)
    return DrafterService(drafter, thread, *limits, observe, timeline, acceptance, caches)


async def serve(
    config: DrafterConfig,
    drafter: Drafter,
    certificates: Certificates | None = None,
    tracer: Tracer | None = None,
) -> None:
    """Serve the drafter until SIGTERM, then drain."""
    thread = ModelThread()
    thread.start()
    sizes = SizeChecks({f"/{SERVICE_NAME}/Draft": REQUEST_SIZES})
    guarded = not rpc.is_loopback(config.listen_address)
    server = rpc.Server([SERVICE_NAME], certificates, [sizes], max_request_bytes=MAX_REQUEST_BYTES, guarded=guarded)
    timeline = open_timeline("drafter", os.environ)
    service = new_service(config, drafter, thread, tracer, timeline)
    drafter_pb2_grpc.add_DrafterServiceServicer_to_server(service, server.grpc)
    try:
        with serving_metrics(config, service, certificates):
            port = await server.start(config.listen_address, config.health_port)
            await finished(thread, drafter.warm_up)
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


def serving_metrics(
    config: DrafterConfig, service: DrafterService, certificates: Certificates | None
) -> contextlib.AbstractContextManager[None]:
    """Serve metrics while the context is open, if configured."""
    if not config.metrics_port:
        return contextlib.nullcontext()
    # Imported late: only needed with a metrics server.
    from coppice.obs import metrics_server
    from drafter_svc.metrics import drafter_metrics

    return metrics_server.serving_metrics(
        lambda: drafter_metrics(service, certificates),
        config.listen_address,
        config.metrics_port,
        certificates,
        config.metrics_tls,
    )


async def finished(thread: ModelThread, job: Callable[[], None]) -> None:
    """Run a job on the model thread and wait for it; its exception is raised here."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[None] = loop.create_future()

    def run() -> None:
        try:
            job()
        except BaseException as error:  # any exception: the caller waits for it
            loop.call_soon_threadsafe(result.set_exception, error)
            raise
        loop.call_soon_threadsafe(result.set_result, None)

    thread.submit(run)
    await result
