"""The orchestrator put together: built by constructors, taken down in the opposite order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass

from coppice.rpc import Server
from coppice.tokenizer import TargetTokenizer
from coppice.v1 import inference_pb2_grpc
from orchestrator.admission import Admission
from orchestrator.config import Config
from orchestrator.drafter_client import DrafterClient, DrafterPool
from orchestrator.planner import FixedPlanner, Planner
from orchestrator.planning.adaptive import AdaptivePlanner
from orchestrator.planning.fleet import FleetPlanner
from orchestrator.prefix_cache.cache import PrefixCache
from orchestrator.prefix_cache.opening import open_cache
from orchestrator.service import SERVICE_NAME, InferenceService, Limits
from orchestrator.verifier_pool import VerifierPool

logger = logging.getLogger(__name__)

# How long the start waits for the first answer of a drafter that is not required.
FIRST_ANSWER_S = 3.0


@dataclass(frozen=True)
class Orchestrator:
    """A running orchestrator."""

    address: str
    service: InferenceService
    verifiers: VerifierPool
    drafters: DrafterPool
    # None where CACHE_DRAFTER switches it off.
    cache: PrefixCache | None


@contextlib.asynccontextmanager
async def running(config: Config) -> AsyncIterator[Orchestrator]:
    """An orchestrator that serves while the context is open, and drains when it closes.

    Raises:
        UnavailableError: no verifier was reached in time.
        IncompatibleError: drafters are required, and one does not fit or is not there.
        ConfigError: the prefix cache cannot be where it is to be.
    """
    async with contextlib.AsyncExitStack() as stack:
        verifiers = VerifierPool(config.verifier_addresses, config.resume_s)
        stack.push_async_callback(verifiers.close)
        await verifiers.connect(config.connect_timeout_s)
        fingerprint = verifiers.info.tokenizer_fingerprint
        drafters = DrafterPool([DrafterClient(address, fingerprint) for address in config.drafter_addresses])
        stack.push_async_callback(drafters.close)
        patience_s = config.connect_timeout_s if config.require_drafters else FIRST_ANSWER_S
        await drafters.start(patience_s, config.require_drafters)

        cache = open_cache(config, verifiers.info)
        if cache is not None:
            stack.push_async_callback(cache.close)

        max_nodes = min(config.max_nodes, verifiers.info.max_nodes or config.max_nodes)
        service = InferenceService(
            verifiers=verifiers,
            drafters=drafters,
            planner=_planner(config, max_nodes),
            tokenizer=TargetTokenizer(verifiers.tokenizer_json),
            admission=Admission(config.max_requests, config.max_queued, dict(config.tenant_weights)),
            limits=Limits(
                max_outputs=min(config.max_outputs, config.max_requests),
                max_nodes=max_nodes,
                default_timeout_s=config.default_timeout_s,
            ),
            cache=cache,
        )
        server = Server([SERVICE_NAME])
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(service, server.grpc)
        port = await server.start(config.listen_address)
        stack.push_async_callback(server.stop, config.grace_s)
        health = asyncio.create_task(_follow_health(server, verifiers), name="health")
        stack.push_async_callback(_cancel, health)
        await server.set_serving(True)
        host = config.listen_address.rpartition(":")[0]
        yield Orchestrator(f"{host}:{port}", service, verifiers, drafters, cache)


def _planner(config: Config, max_nodes: int) -> Planner:
    linger_us, verifiers = round(config.linger_ms * 1000), config.verifier_addresses
    if config.planner == "fixed":
        return FixedPlanner(max_nodes, linger_us)
    if len(verifiers) == 1:
        return AdaptivePlanner(max_nodes, linger_us)
    return FleetPlanner(verifiers, max_nodes, linger_us)


async def _follow_health(server: Server, verifiers: VerifierPool) -> None:
    while True:
        is_serving = verifiers.num_usable > 0
        await server.set_serving(is_serving)
        while (verifiers.num_usable > 0) == is_serving:
            await verifiers.changed()


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait({task})
