"""The verifier process: start and stop of model, engine and server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import platform
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from coppice.checkpoints.files import message_of, one_line
from coppice.core.errors import CoppiceError
from coppice.heap import release_library_pages, release_memory, start_again_if_compiled
from coppice.kernels.cpu.compiler import COMPILATIONS, LINKED_MODULES
from coppice.net.certificates import Certificates
from coppice.net.rpc import Server, first_of, is_loopback, run, stop_signal
from coppice.net.stream_observer import StreamObserver
from coppice.obs.otel import open_tracer
from coppice.obs.timeline import StreamTimeline, Timeline, open_timeline
from coppice.obs.tracing import Tracer
from coppice.usable_cores import usable_cores
from coppice.v1 import verifier_pb2, verifier_pb2_grpc
from coppice.wire.message_sizes import SizeChecks
from verifier_svc.config import CONFIGURATION_ERROR, ENGINE_LOST, UNAVAILABLE_ERROR, VerifierConfig
from verifier_svc.engine.engine import Engine
from verifier_svc.engine.scheduler import SchedulerLimits
from verifier_svc.model.loading import load_probed_target
from verifier_svc.model.parallel.sharded_target import Ranks
from verifier_svc.model.target_model import TargetInfo, TargetModel
from verifier_svc.service import VerifierServicer, max_request_bytes, request_sizes
from verifier_svc.stream.sequence_traces import sequence_traces

logger = logging.getLogger(__name__)

# Model thread and event loop share the GIL; the default switch interval of 5 ms would delay messages.
_SWITCH_INTERVAL_S = 1e-4


class EngineLostError(CoppiceError):
    """The model thread has ended unexpectedly: the process cannot run passes any more."""


def new_servicer(
    config: VerifierConfig,
    target: TargetModel,
    info: TargetInfo,
    tracer: Tracer | None = None,
    timeline: Timeline | None = None,
) -> tuple[Engine, VerifierServicer]:
    """An engine, not started yet, and its service."""
    free_rows = info.redraft.free_rows if info.redraft is not None else 0
    limits = SchedulerLimits(config.max_sequences, config.max_queued, config.prefill_chunk, config.max_rows, free_rows)
    engine = Engine(target, info, limits, config.max_nodes, timeline=timeline)
    observe: list[Callable[[], StreamObserver]] = []
    if tracer is not None:
        observe.append(partial(sequence_traces, tracer))
    if timeline is not None:
        observe.append(partial(StreamTimeline, timeline, "orchestrator"))
    runs_on = hardware(target.device, config.threads, config.tensor_parallel)
    return engine, VerifierServicer(engine, info, config.max_nodes, runs_on, observe, config.target_revision)


async def serve(
    config: VerifierConfig,
    target: TargetModel,
    info: TargetInfo,
    certificates: Certificates | None = None,
    tracer: Tracer | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, then drain.

    Raises:
        EngineLostError: the model thread has ended; all streams are cut, so that sequences move to other verifiers at
        once.
    """
    timeline = open_timeline("verifier", os.environ)
    engine, servicer = new_servicer(config, target, info, tracer, timeline)
    if target.device.type == "cpu" and config.tensor_parallel == 1:
        start_again_if_compiled(COMPILATIONS.num_kept)
    LINKED_MODULES.release()
    release_memory()
    release_library_pages()
    name = verifier_pb2.DESCRIPTOR.services_by_name["VerifierService"].full_name
    sizes = SizeChecks({f"/{name}/Verify": request_sizes(info.max_context_tokens)})
    most_bytes = max_request_bytes(info.max_context_tokens)
    guarded = not is_loopback(config.listen_address)
    server = Server([name], certificates, [sizes], max_request_bytes=most_bytes, guarded=guarded)
    verifier_pb2_grpc.add_VerifierServiceServicer_to_server(servicer, server.grpc)
    host = config.listen_address.rpartition(":")[0]
    loop, lost = asyncio.get_running_loop(), asyncio.Event()
    with serving_metrics(config, engine, info, certificates):
        port = await server.start(config.listen_address, config.health_port)
        engine.start(lambda: loop.call_soon_threadsafe(lost.set))
        await server.set_serving(True)
        print(f"ready {host}:{port}", flush=True)  # noqa: T201  the parent process waits for this line
        await first_of(stop_signal(), lost.wait())
        if not lost.is_set():
            servicer.drain()
        await server.stop(0.0 if lost.is_set() else config.grace_s)
    engine.stop()
    if tracer is not None:
        await asyncio.to_thread(tracer.close)
    if timeline is not None:
        timeline.write()
    if lost.is_set():
        raise EngineLostError("the model thread has ended")


def run_verifier(config: VerifierConfig, certificates: Certificates | None = None) -> None:
    """Load the model, serve."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    with contextlib.ExitStack() as stack:
        try:
            target, info = load_probed_target(config, _other_ranks(config, stack))
            # After starting the other ranks: it starts a thread.
            tracer = open_tracer("coppice-verifier", os.environ)
        except (CoppiceError, ValueError, OSError) as error:
            logger.error("%s", message_of(error))
            sys.exit(CONFIGURATION_ERROR)
        except (MemoryError, RuntimeError) as error:
            if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "not enough memory" not in str(error):
                raise
            logger.error("no memory for the target and its KV cache (%s): lower KV_CACHE_MIB", one_line(error))
            sys.exit(CONFIGURATION_ERROR)
        try:
            run(lambda: serve(config, target, info, certificates, tracer))
        except EngineLostError as error:
            logger.error("%s", error)
            sys.exit(ENGINE_LOST)
        except CoppiceError as error:
            logger.error("%s", error)
            sys.exit(UNAVAILABLE_ERROR)


def serving_metrics(
    config: VerifierConfig, engine: Engine, info: TargetInfo, certificates: Certificates | None
) -> contextlib.AbstractContextManager[None]:
    """Serve metrics until the context is left, if enabled."""
    if not config.metrics_port:
        return contextlib.nullcontext()
    # Imported here, to save memory and time without metrics.
    from coppice.obs import metrics_server
    from verifier_svc.metrics import verifier_metrics

    return metrics_server.serving_metrics(
        lambda: verifier_metrics(engine, info, certificates),
        config.listen_address,
        config.metrics_port,
        certificates,
        config.metrics_tls,
    )


def _other_ranks(config: VerifierConfig, stack: contextlib.ExitStack) -> Ranks | None:
    """Other processes of a tensor-parallel target, running until `stack` is left; None without tensor parallelism."""
    if config.tensor_parallel == 1:
        return None
    # Imported here, so that nothing else depends on torch.distributed.
    from verifier_svc.model.parallel.tensor_parallel import leading

    return stack.enter_context(leading(config))


_CPU_INFO = Path("/proc/cpuinfo")


def hardware(device: torch.device, threads: int, num_processes: int) -> str:
    """Kind of processor, threads per process (0: chosen per pass), and processes of the target."""
    if device.type == "cuda":
        return f"cuda {torch.cuda.get_device_name(device)}, {num_processes} processes"
    return f"{device.type} {_cpu_model()}, {usable_cores()} cores, {threads} threads, {num_processes} processes"


def _cpu_model() -> str:
    if _CPU_INFO.exists():
        for line in _CPU_INFO.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
