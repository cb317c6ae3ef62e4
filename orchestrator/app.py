"""Construction of the orchestrator; closed in reverse order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from coppice.core.chat import ChatTemplate
from coppice.core.errors import IncompatibleError
from coppice.core.tokenizer import TargetTokenizer
from coppice.net.certificates import Certificates, read_certificates
from coppice.net.rpc import Server, is_loopback
from coppice.obs.timeline import StreamTimeline, Timeline
from coppice.obs.tracing import Tracing
from coppice.v1 import inference_pb2_grpc
from coppice.wire.message_sizes import SizeChecks
from orchestrator.admission.admission import Admission
from orchestrator.api.authentication import Authentication
from orchestrator.api.service import SERVICE_NAME, InferenceService, RequestLimits
from orchestrator.api.tenant_usage import TenantUsage
from orchestrator.api.token_file import TokenFile
from orchestrator.api.validation import detokenize_sizes, max_request_bytes, request_sizes, tokenize_sizes
from orchestrator.config import Config
from orchestrator.peers.drafter_client import DraftedTarget, DrafterClient, DrafterPool
from orchestrator.peers.peer_channel import Dial, dial
from orchestrator.peers.peer_stream import MOST_WORDS
from orchestrator.peers.verifier_client import VerifierInfo
from orchestrator.peers.verifier_pool import VerifierPool
from orchestrator.planner.base import FixedPlanner, Planner
from orchestrator.planner.fleet import FleetPlanner
from orchestrator.prefix_cache.cache import PrefixCache, open_cache, open_namespace
from orchestrator.request.round_feed import RoundFeed

if TYPE_CHECKING:
    from orchestrator.request.latencies import Latencies

logger = logging.getLogger(__name__)

# Seconds to wait at start for the first answer of optional drafters.
FIRST_ANSWER_S = 3.0


@dataclass(frozen=True)
class Orchestrator:
    """A running orchestrator."""

    address: str
    service: InferenceService
    verifiers: VerifierPool
    drafters: DrafterPool
    # None if CACHE_DRAFTER is off.
    cache: PrefixCache | None


@contextlib.asynccontextmanager
async def running(
    config: Config, tracing: Tracing | None = None, timeline: Timeline | None = None, dial: Dial = dial
) -> AsyncIterator[Orchestrator]:
    """Run an orchestrator while the context is open; closing drains it.

    Without `tracing` requests are not traced; without `timeline` streams are not recorded. `dial` opens channels to
    verifiers and drafters.

    Raises:
        UnavailableError: no verifier connected in time.
        IncompatibleError: the verifiers' tokenizer is not valid, or drafters are required, and one does not match or
            did not connect.
        ConfigError: the prefix cache or the token file cannot be opened.
        ValueError: a certificate is invalid.
    """
    certificates = read_certificates(config.tls, "TLS_")
    to_peers = read_certificates(config.backend_tls, "BACKEND_TLS_")
    async with contextlib.AsyncExitStack() as stack:
        # First, so that its errors show before any wait for a verifier.
        authentication = _authentication(stack, config)
        verifiers = VerifierPool(config.verifier_addresses, config.resume_s, to_peers, dial, config.target_revision)
        stack.push_async_callback(verifiers.close)
        await verifiers.connect(config.connect_timeout_s)
        drafters = await _drafters(stack, config, verifiers.info, to_peers, dial)
        if timeline is not None:
            _watch(timeline, verifiers, drafters)
        cache = open_cache(config, open_namespace(config, verifiers.info), verifiers.info.vocab_size)
        if cache is not None:
            stack.push_async_callback(cache.close)

        max_nodes = min(config.max_nodes, verifiers.info.max_nodes or config.max_nodes)
        planner = _planner(config, max_nodes, verifiers)
        admission = _admission(config)
        round_feed = RoundFeed() if config.watch_rounds else None
        service = InferenceService(
            verifiers=verifiers,
            drafters=drafters,
            planner=planner,
            tokenizer=_tokenizer(verifiers.tokenizer.tokenizer_json),
            template=ChatTemplate(verifiers.tokenizer.chat_template, verifiers.tokenizer.special_tokens),
            admission=admission,
            limits=RequestLimits(
                max_outputs=min(config.max_outputs, config.max_requests),
                max_nodes=max_nodes,
                default_timeout_s=config.default_timeout_s,
                unread_s=config.unread_s,
                synchronous=config.is_synchronous,
            ),
            cache=cache,
            latencies=_latencies(config),
            tenant_usage=TenantUsage(config.cache_secret, admission.retry_after_s),
            authentication=authentication,
            tracing=tracing,
            timeline=timeline,
            round_feed=round_feed,
        )
        if config.metrics_port:
            await _serve_metrics(stack, config, service, certificates, to_peers)
        max_context = verifiers.info.max_context_tokens
        sizes = SizeChecks(
            {
                f"/{SERVICE_NAME}/Generate": request_sizes(max_context),
                f"/{SERVICE_NAME}/Tokenize": tokenize_sizes(max_context),
                f"/{SERVICE_NAME}/Detokenize": detokenize_sizes(max_context),
            }
        )
        server = Server(
            [SERVICE_NAME],
            certificates,
            # Calls without a token are refused before their message is read.
            [authentication, sizes] if authentication is not None else [sizes],
            max_request_bytes=max_request_bytes(max_context),
        )
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(service, server.grpc)
        port = await server.start(config.listen_address, config.health_port)
        stack.push_async_callback(server.stop, config.grace_s)
        if round_feed is not None:
            stack.callback(round_feed.close)
        health = asyncio.create_task(_follow_health(server, verifiers), name="health")
        stack.push_async_callback(_cancel, health)
        await server.set_serving(True)
        host = config.listen_address.rpartition(":")[0]
        yield Orchestrator(f"{host}:{port}", service, verifiers, drafters, cache)


async def _drafters(
    stack: contextlib.AsyncExitStack, config: Config, info: VerifierInfo, certificates: Certificates | None, dial: Dial
) -> DrafterPool:
    """All drafters; waits for those that answer soon, or for all if required."""
    drafters = DrafterPool(
        [
            DrafterClient(address, info.tokenizer_fingerprint, certificates, dial, DraftedTarget.of(info))
            for address in config.drafter_addresses
        ]
    )
    stack.push_async_callback(drafters.close)
    patience_s = config.connect_timeout_s if config.require_drafters else FIRST_ANSWER_S
    await drafters.start(patience_s, config.require_drafters)
    return drafters


def _tokenizer(tokenizer_json: bytes) -> TargetTokenizer:
    try:
        return TargetTokenizer(tokenizer_json)
    except ValueError as error:
        raise IncompatibleError(f"the verifiers' tokenizer cannot be used: {str(error)[:MOST_WORDS]}") from error


def _admission(config: Config) -> Admission:
    return Admission(
        config.max_requests,
        config.max_queued,
        dict(config.tenant_weights),
        max_token_s=config.max_token_ms / 1000 or None,
        max_wait_s=config.max_queue_wait_s or None,
        # With tokens, tenants have limits of their own, and connections do not identify them.
        shared_places=0 if config.tokens_file else config.shared_places,
        call_later=asyncio.get_running_loop().call_later,
    )


def _authentication(stack: contextlib.AsyncExitStack, config: Config) -> Authentication | None:
    """Authentication by TOKENS_FILE; None without it."""
    if not config.tokens_file:
        if not is_loopback(config.listen_address):
            logger.warning("any client that reaches %s can use it: TOKENS_FILE is not set", config.listen_address)
        return None
    tokens = TokenFile(Path(config.tokens_file))
    following = asyncio.create_task(tokens.follow(), name="tokens")
    stack.push_async_callback(_cancel, following)
    return Authentication(tokens, open_reflection=config.open_reflection)


def _planner(config: Config, max_nodes: int, verifiers: VerifierPool) -> Planner:
    linger_us, addresses = round(config.linger_ms * 1000), config.verifier_addresses
    if config.is_synchronous:
        # Every round has a draft and waits for it, whether it pays or not.
        return FixedPlanner(max_nodes, round(config.synchronous_wait_s * 1e6))
    if config.planner == "fixed":
        return FixedPlanner(max_nodes, linger_us)
    return FleetPlanner(addresses, max_nodes, linger_us, is_usable=verifiers.is_usable)


def _watch(timeline: Timeline, verifiers: VerifierPool, drafters: DrafterPool) -> None:
    for verifier in verifiers.clients:
        verifier.stream.observer = StreamTimeline(timeline, "verifier")
    for drafter in drafters.clients:
        drafter.stream.observer = StreamTimeline(timeline, "drafter")


def _latencies(config: Config) -> Latencies | None:
    """Latency histograms; None without a metrics server."""
    if not config.metrics_port:
        return None
    # Imported late: only needed with a metrics server.
    from orchestrator.request.latencies import Latencies

    return Latencies()


async def _serve_metrics(
    stack: contextlib.AsyncExitStack,
    config: Config,
    service: InferenceService,
    certificates: Certificates | None,
    to_peers: Certificates | None,
) -> None:
    # Imported late: only needed with a metrics server.
    from coppice.obs.metrics import Prefix
    from coppice.obs.metrics_server import MetricsServer, on_event_loop

    own = Prefix("coppice_orchestrator_")
    host = config.listen_address.rpartition(":")[0].strip("[]")
    read = on_event_loop(lambda: [*service.metrics(), *own.certificates(server=certificates, client=to_peers)])
    server = MetricsServer(read, host, config.metrics_port, certificates, config.metrics_tls)
    # In a thread: it joins the server's thread, which may wait for the event loop.
    stack.push_async_callback(asyncio.to_thread, server.stop)


async def _follow_health(server: Server, verifiers: VerifierPool) -> None:
    while True:
        is_serving = verifiers.num_usable > 0
        await server.set_serving(is_serving)
        while (verifiers.num_usable > 0) == is_serving:
            await verifiers.changed()


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait({task})
