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
from orchestrator.config import Config
from orchestrator.drafter_client import DrafterClient, DrafterPool
from orchestrator.planner import FixedPlanner, Planner
from orchestrator.planning.adaptive import AdaptivePlanner
from orchestrator.service import SERVICE_NAME, InferenceService, Limits
from orchestrator.verifier_client import VerifierClient

logger = logging.getLogger(__name__)

# How long the start waits for the first answer of a drafter that is not required.
FIRST_ANSWER_S = 3.0


@dataclass(frozen=True)
class Orchestrator:
    """A running orchestrator."""

    address: str
    service: InferenceService
    verifier: VerifierClient
    drafters: DrafterPool


@contextlib.asynccontextmanager
async def running(config: Config) -> AsyncIterator[Orchestrator]:
    """An orchestrator that serves while the context is open, and drains when it closes.

    Raises:
        UnavailableError: the verifier was not reached in time.
        IncompatibleError: drafters are required, and one does not fit or is not there.
    """
    async with contextlib.AsyncExitStack() as stack:
        verifier = VerifierClient(config.verifier_address, config.resume_s)
        stack.push_async_callback(verifier.close)
        await verifier.connect(config.connect_timeout_s)
        fingerprint = verifier.info.tokenizer_fingerprint
        drafters = DrafterPool([DrafterClient(address, fingerprint) for address in config.drafter_addresses])
        stack.push_async_callback(drafters.close)
        patience_s = config.connect_timeout_s if config.require_drafters else FIRST_ANSWER_S
        await drafters.start(patience_s, config.require_drafters)

        max_nodes = min(config.max_nodes, verifier.info.max_nodes or config.max_nodes)
        service = InferenceService(
            verifier=verifier,
            drafters=drafters,
            planner=_planner(config, max_nodes),
            tokenizer=TargetTokenizer(verifier.tokenizer_json),
            limits=Limits(
                max_requests=config.max_requests,
                max_outputs=min(config.max_outputs, config.max_requests),
                max_nodes=max_nodes,
                default_timeout_s=config.default_timeout_s,
            ),
        )
        server = Server([SERVICE_NAME])
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(service, server.grpc)
        port = await server.start(config.listen_address)
        stack.push_async_callback(server.stop, config.grace_s)
        health = asyncio.create_task(_follow_health(server, verifier), name="health")
        stack.push_async_callback(_cancel, health)
        await server.set_serving(True)
        host = config.listen_address.rpartition(":")[0]
        yield Orchestrator(f"{host}:{port}", service, verifier, drafters)


def _planner(config: Config, max_nodes: int) -> Planner:
    kind = AdaptivePlanner if config.planner == "adaptive" else FixedPlanner
    return kind(max_nodes, round(config.linger_ms * 1000))


async def _follow_health(server: Server, verifier: VerifierClient) -> None:
    while True:
        await server.set_serving(verifier.stream.connected)
        await verifier.stream.changed()


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait({task})
