"""Construction of all three services in one process; closed in reverse order."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

import torch

import drafter_svc.app
import orchestrator.app
import verifier_svc.app
from coppice.colocated.channel import InMemoryNetwork
from coppice.colocated.config import ColocatedConfig, names
from coppice.colocated.server import InMemoryServer
from coppice.obs.otel import open_tracer, open_tracing
from coppice.obs.timeline import Timeline, open_timeline
from coppice.obs.tracing import Tracer
from coppice.v1 import drafter_pb2_grpc, verifier_pb2_grpc
from drafter_svc.config import DrafterConfig
from drafter_svc.drafters.base import Drafter
from drafter_svc.drafters.registry import load_drafter
from drafter_svc.model.model_thread import ModelThread
from orchestrator.app import Orchestrator
from verifier_svc.config import VerifierConfig
from verifier_svc.model.loading import load_probed_target
from verifier_svc.model.target_model import TargetInfo, TargetModel


@dataclass(frozen=True)
class LoadedModels:
    """Loaded models, in the configuration's order."""

    targets: tuple[tuple[TargetModel, TargetInfo], ...]
    drafters: tuple[Drafter, ...]


@dataclass(frozen=True)
class Colocated:
    """A running deployment: orchestrator, and in-memory servers of verifiers and drafters."""

    orchestrator: Orchestrator
    verifiers: tuple[InMemoryServer, ...]
    drafters: tuple[InMemoryServer, ...]
    # Set when a verifier's model thread has ended unasked.
    lost: asyncio.Event


def load(config: ColocatedConfig) -> LoadedModels:
    """Load all models; slow, so not on a serving event loop.

    Raises:
        CoppiceError, OSError, ValueError: a model cannot be used.
    """
    targets = tuple(load_probed_target(one) for one in config.verifiers)
    return LoadedModels(targets, tuple(load_drafter(one) for one in config.drafters))


@contextlib.asynccontextmanager
async def running(
    config: ColocatedConfig, models: LoadedModels, env: Mapping[str, str] = os.environ
) -> AsyncIterator[Colocated]:
    """Run a deployment while the context is open; closing drains it.

    `env` configures tracing and timelines.

    Raises:
        CoppiceError: the address is taken, or a drafter does not match the target.
        ValueError: a setting is invalid.
    """
    network = InMemoryNetwork()
    lost = asyncio.Event()
    async with contextlib.AsyncExitStack() as stack:
        verifiers = [
            await stack.enter_async_context(_verifier(one, *model, number, env, lost))
            for number, (one, model) in enumerate(zip(config.verifiers, models.targets, strict=True))
        ]
        drafters = [
            await stack.enter_async_context(_drafter(one, drafter, number, env))
            for number, (one, drafter) in enumerate(zip(config.drafters, models.drafters, strict=True))
        ]
        for what, servers in (("verifier", verifiers), ("drafter", drafters)):
            for name, server in zip(names(what, len(servers)), servers, strict=True):
                network.serve(name, server)
        tracing = open_tracing("coppice-orchestrator", env)
        timeline = open_timeline("orchestrator", env)
        stack.push_async_callback(_close, None if tracing is None else tracing.tracer, timeline)
        serving = orchestrator.app.running(config.orchestrator, tracing, timeline, network.dial)
        yield Colocated(await stack.enter_async_context(serving), tuple(verifiers), tuple(drafters), lost)


@contextlib.asynccontextmanager
async def _verifier(
    config: VerifierConfig,
    target: TargetModel,
    info: TargetInfo,
    number: int,
    env: Mapping[str, str],
    lost: asyncio.Event,
) -> AsyncIterator[InMemoryServer]:
    loop = asyncio.get_running_loop()
    tracer, timeline = open_tracer("coppice-verifier", env), open_timeline(_numbered("verifier", number), env)
    engine, servicer = verifier_svc.app.new_servicer(config, target, info, tracer, timeline)
    server = InMemoryServer()
    verifier_pb2_grpc.add_VerifierServiceServicer_to_server(servicer, server)
    with verifier_svc.app.serving_metrics(config, engine, info, None):
        engine.start(lambda: loop.call_soon_threadsafe(lost.set))
        try:
            yield server
        finally:
            servicer.drain()
            await server.stop(config.grace_s)
            await asyncio.to_thread(engine.stop)
            await _close(tracer, timeline)


@contextlib.asynccontextmanager
async def _drafter(
    config: DrafterConfig, drafter: Drafter, number: int, env: Mapping[str, str]
) -> AsyncIterator[InMemoryServer]:
    tracer, timeline = open_tracer("coppice-drafter", env), open_timeline(_numbered("drafter", number), env)
    thread = ModelThread(lambda: _set_up(config))
    thread.start()
    server = InMemoryServer()
    service = drafter_svc.app.new_service(config, drafter, thread, tracer, timeline)
    drafter_pb2_grpc.add_DrafterServiceServicer_to_server(service, server)
    try:
        with drafter_svc.app.serving_metrics(config, service, None):
            await drafter_svc.app.finished(thread, drafter.warm_up)
            yield server
    finally:
        await server.stop(config.grace_s)
        await asyncio.to_thread(thread.stop)
        await _close(tracer, timeline)


def _set_up(config: DrafterConfig) -> None:
    """Apply settings that a process of its own has from its environment, to the drafter's model thread."""
    torch.set_num_threads(config.num_threads)
    # Linux has niceness per thread; elsewhere it would affect the whole process.
    if sys.platform == "linux" and config.niceness:
        own = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, own, min(19, os.getpriority(os.PRIO_PROCESS, own) + config.niceness))


def _numbered(service: str, number: int) -> str:
    """Name of a service's timeline within the process."""
    return f"{service}-{number + 1}" if number else service


async def _close(tracer: Tracer | None, timeline: Timeline | None) -> None:
    if tracer is not None:
        await asyncio.to_thread(tracer.close)
    if timeline is not None:
        timeline.write()
