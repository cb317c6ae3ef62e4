"""Construction of gRPC servers and channels, and translation of errors to statuses."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import functools
import ipaddress
import logging
import signal
import ssl
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.any_pb2 import Any as ProtoAny
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status

from coppice.core.errors import CoppiceError, InvalidRequestError, OverloadedError, UnavailableError
from coppice.frozen_heap import frozen_heap
from coppice.heap import give_memory_back
from coppice.net.certificates import Certificates, channel_credentials, server_credentials
from coppice.net.guard.guarded_server import GuardedServer
from coppice.net.guard.limits import GuardLimits
from coppice.net.guard.pending import MAX_PENDING, BeginsCalls, PendingCalls
from coppice.net.lasting_server import LastingServer
from coppice.net.server_contexts import ServerContexts
from coppice.wire.unreadable import UnreadableRequests, check_request

logger = logging.getLogger(__name__)

# Size limit of a message; long prompts and tokenizers fit.
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
# Concurrent calls per connection; further ones wait.
MAX_CONCURRENT_STREAMS = 1024
# Clients that ping more often are disconnected (GOAWAY too_many_pings).
MIN_PING_INTERVAL_MS = 2_000
KEEPALIVE_MS = 30_000
KEEPALIVE_TIMEOUT_MS = 10_000
# Between services: a peer silent for this long is pinged, and lost after as long again without an answer; its work
# then continues elsewhere. gRPC answers pings on its own threads, also while a model runs, and sends none while rounds
# are exchanged.
PEER_KEEPALIVE_MS = 4_000
# Flow control window: bytes of a call sent before they are read.
WINDOW_BYTES = 1 << 18
RECONNECT_MIN_MS = 100
# Time limit of a connection attempt, TLS included; gRPC calls it minimum backoff.
CONNECT_MS = 2_000
RECONNECT_MAX_MS = 5_000
# Health service for liveness probes: SERVING while the event loop runs. Readiness is the status of each service.
LIVENESS = "coppice.liveness"


def _keepalive(time_ms: int) -> tuple[tuple[str, int], ...]:
    """Options: ping after a silence of `time_ms`, and close the connection without an answer in time.

    The keepalive timeout alone leaves dead connections open: gRPC waits for ping_timeout.
    """
    timeout_ms = min(time_ms, KEEPALIVE_TIMEOUT_MS)
    return (
        ("grpc.keepalive_time_ms", time_ms),
        ("grpc.keepalive_timeout_ms", timeout_ms),
        ("grpc.http2.ping_timeout_ms", timeout_ms),
    )


_COMMON_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_permit_without_calls", 1),
    # No BDP probe pings: fixed windows are large enough.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
)
_SERVER_OPTIONS = (
    *_COMMON_OPTIONS,
    *_keepalive(KEEPALIVE_MS),
    ("grpc.max_concurrent_streams", MAX_CONCURRENT_STREAMS),
    # A second server on the port must fail, not take half of the traffic.
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
)
# Health checks need no authentication, so they get little. gRPC takes the first of duplicate options.
_MAX_HEALTH_MESSAGE_BYTES = 4096
_MAX_HEALTH_STREAMS = 4
_MAX_HEALTH_CONNECTIONS = 128
# A connection with TLS buffers up to 2 MiB while its bytes wait for their turn; one without, a tenth of that.
_MAX_TLS_CONNECTIONS = 192
_MAX_TLS_HANDSHAKES = 64
_HEALTH_OPTIONS = (
    ("grpc.max_receive_message_length", _MAX_HEALTH_MESSAGE_BYTES),
    ("grpc.max_concurrent_streams", _MAX_HEALTH_STREAMS),
    *_SERVER_OPTIONS,
)
_CHANNEL_OPTIONS = (
    *_COMMON_OPTIONS,
    ("grpc.initial_reconnect_backoff_ms", RECONNECT_MIN_MS),
    ("grpc.min_reconnect_backoff_ms", CONNECT_MS),
    # No limit on pings: a call may wait for its answer for as long as it takes.
    ("grpc.http2.max_pings_without_data", 0),
)

# Bytes of a status' text in UTF-8. Others than ASCII take three times as many in metadata.
MAX_STATUS_BYTES = 1024

_GRPC_TO_RPC_CODE: dict[grpc.StatusCode, int] = {code: code.value[0] for code in grpc.StatusCode}

Handler = TypeVar("Handler", bound=Callable[..., Any])


def open_channel(
    address: str,
    max_reconnect_ms: int = RECONNECT_MAX_MS,
    keepalive_ms: int = KEEPALIVE_MS,
    certificates: Certificates | None = None,
    *,
    has_own_connection: bool = False,
) -> grpc.aio.Channel:
    """Channel with keepalive and quick reconnects, at most `max_reconnect_ms` apart.

    Channels of one process to one address share a connection, unless they have their own. Plaintext without
    certificates; with them it keeps the current ones for its lifetime.
    """
    options: list[tuple[str, Any]] = [
        *_CHANNEL_OPTIONS,
        ("grpc.max_reconnect_backoff_ms", max_reconnect_ms),
        *_keepalive(keepalive_ms),
        ("grpc.use_local_subchannel_pool", int(has_own_connection)),
    ]
    if certificates is None:
        return grpc.aio.insecure_channel(address, options=options)
    if name := certificates.server_name:
        options.append(("grpc.ssl_target_name_override", name))
    return grpc.aio.secure_channel(address, channel_credentials(certificates.current()), options=options)


def error_status(error: CoppiceError) -> status_pb2.Status:
    """The error as a google.rpc.Status with BadRequest or RetryInfo details.

    Texts are cut: a status travels in metadata, of which clients take 16 KiB, and libraries quote what they refuse.
    """
    details: Message | None = None
    if isinstance(error, InvalidRequestError):
        description = _cut(error.description)
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=description)
        details = error_details_pb2.BadRequest(field_violations=[violation])
    elif isinstance(error, OverloadedError):
        delay = Duration()
        delay.FromMilliseconds(int(error.retry_after_s * 1000))
        details = error_details_pb2.RetryInfo(retry_delay=delay)
    status = status_pb2.Status(code=_GRPC_TO_RPC_CODE[error.status], message=_cut(str(error)))
    if details is not None:
        packed = ProtoAny()
        packed.Pack(details)
        status.details.append(packed)
    return status


def _cut(text: str) -> str:
    encoded = text.encode(errors="replace")
    if len(encoded) <= MAX_STATUS_BYTES:
        return text
    return encoded[:MAX_STATUS_BYTES].decode(errors="ignore") + "…"


@contextlib.asynccontextmanager
async def errors_as_status(context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
    """Abort the call with the error's status; texts of internal errors only go to the log."""
    try:
        yield
    except (grpc.aio.AbortError, grpc.aio.UsageError, asyncio.CancelledError):
        raise
    except Exception as error:
        if isinstance(error, CoppiceError) and error.status != grpc.StatusCode.INTERNAL:
            await context.abort_with_status(rpc_status.to_status(error_status(error)))
        # Internal errors may contain private details: clients only get an incident id.
        incident = uuid.uuid4().hex[:12]
        logger.exception("unexpected error, incident %s", incident)
        await context.abort(grpc.StatusCode.INTERNAL, f"internal error, incident {incident}")


@contextlib.asynccontextmanager
async def conversing(context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
    """`errors_as_status` for a method that reads while it writes.

    The headers go first: gRPC cannot abort a call whose headers are on their way with its first message, and the call
    would last until its deadline.
    """
    async with errors_as_status(context):
        await context.send_initial_metadata(())
        yield


def unary(method: Handler) -> Handler:
    """Wrap a unary servicer method so that its errors become statuses."""

    @functools.wraps(method)
    async def wrapped(self: Any, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        async with errors_as_status(context):
            check_request(request)
            return await method(self, request, context)

    return wrapped  # type: ignore[return-value]


def streaming(method: Handler) -> Handler:
    """Wrap a response-streaming servicer method (an async generator) so that its errors become statuses."""

    @functools.wraps(method)
    async def wrapped(self: Any, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        async with errors_as_status(context):
            check_request(request)
            responses = method(self, request, context)
            async with contextlib.aclosing(responses):
                async for response in responses:
                    yield response

    return wrapped  # type: ignore[return-value]


def is_loopback(address: str) -> bool:
    """Whether a listen address is only reachable from this machine."""
    host = address.rpartition(":")[0].strip("[]")
    if host in ("localhost", "unix"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False


class Server:
    """gRPC server with health and reflection; NOT_SERVING at first, and drains on stop.

    With certificates it only speaks TLS. Plaintext health checks can have a port of their own.
    """

    def __init__(
        self,
        service_names: Sequence[str],
        certificates: Certificates | None = None,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        max_request_bytes: int = MAX_MESSAGE_BYTES,
        *,
        guarded: bool = True,
    ) -> None:
        """Calls with a message above `max_request_bytes` fail with RESOURCE_EXHAUSTED.

        Unless `guarded`, clients reach gRPC directly, which is only for this machine's users.
        """
        pending = PendingCalls(MAX_PENDING)
        every_call = [*([BeginsCalls(pending)] if guarded else []), *interceptors, UnreadableRequests()]
        # gRPC takes the first of duplicate options.
        options = (("grpc.max_receive_message_length", max_request_bytes), *_SERVER_OPTIONS)
        make = functools.partial(grpc.aio.server, options=options, interceptors=every_call)
        self.grpc: grpc.aio.Server = make() if guarded else LastingServer(make)
        self._certificates = certificates
        streaming, unary = _methods(service_names)
        limits = GuardLimits(max_request_bytes, MAX_CONCURRENT_STREAMS, streaming=streaming, unary=unary)
        if certificates is not None:
            limits = replace(limits, max_connections=_MAX_TLS_CONNECTIONS, max_handshakes=_MAX_TLS_HANDSHAKES)
        self._guarded = GuardedServer(self.grpc, limits, _contexts(certificates), pending) if guarded else None
        # Health-only server.
        self._probed: GuardedServer | None = None
        self._names = ["", *service_names]
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        listed = (*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(listed, self.grpc)

    async def start(self, address: str, health_port: int = 0) -> int:
        """Bind and start; returns the port. Health stays NOT_SERVING until `set_serving`.

        With `health_port`, health is also served there, on the host of the address.

        Raises:
            UnavailableError: the address is taken or not local.
        """
        await self.set_serving(False)
        await self._health.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        if self._guarded is not None:
            port = await self._guarded.start(address)
        else:
            credentials = None if self._certificates is None else server_credentials(self._certificates)
            port = _bind(self.grpc, address, credentials)
            await self.grpc.start()
        if health_port:
            server = grpc.aio.server(options=_HEALTH_OPTIONS)
            health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
            limits = GuardLimits(
                _MAX_HEALTH_MESSAGE_BYTES, _MAX_HEALTH_STREAMS, max_connections=_MAX_HEALTH_CONNECTIONS
            )
            self._probed = GuardedServer(server, limits)
            try:
                await self._probed.start(f"{address.rpartition(':')[0]}:{health_port}")
            except UnavailableError:
                await self._stop(None)
                raise
        return port

    async def set_serving(self, serving: bool) -> None:
        """Set the health of every service."""
        kinds = health_pb2.HealthCheckResponse
        status = kinds.SERVING if serving else kinds.NOT_SERVING
        for name in self._names:
            await self._health.set(name, status)

    async def stop(self, grace_s: float) -> None:
        """Leave the load balancer, let calls in flight finish for `grace_s`, then cancel the rest."""
        await self._health.enter_graceful_shutdown()
        await self._stop(grace_s)
        if self._probed is not None:
            await self._probed.stop(None)

    async def _stop(self, grace_s: float | None) -> None:
        if self._guarded is not None:
            await self._guarded.stop(grace_s)
        else:
            await self.grpc.stop(grace_s)


def _bind(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None) -> int:
    try:
        if credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise UnavailableError(f"cannot listen at {address}: {error}") from error


def _contexts(certificates: Certificates | None) -> Callable[[], ssl.SSLContext] | None:
    if certificates is None:
        return None
    asks_client = certificates.current().ca is not None
    return ServerContexts(certificates, asks_client=asks_client, protocols=["h2"]).current


def _methods(service_names: Sequence[str]) -> tuple[frozenset[bytes], frozenset[bytes]]:
    """Paths of methods with a stream of requests, and with one request; health included."""
    paths: dict[bool, set[bytes]] = {False: set(), True: set()}
    for name in (*service_names, health.SERVICE_NAME):
        for method in descriptor_pool.Default().FindServiceByName(name).methods:
            paths[method.client_streaming].add(f"/{name}/{method.name}".encode())
    return frozenset(paths[True]), frozenset(paths[False])


async def stop_signal() -> None:
    """Wait for SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await stop.wait()


async def first_of(*waits: Coroutine[Any, Any, object]) -> None:
    """Wait for the first of these; the others are cancelled."""
    tasks = [asyncio.create_task(wait) for wait in waits]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


def run(main: Callable[[], Awaitable[None]]) -> None:
    """Run a service's main coroutine, on uvloop if installed.

    What is loaded is exempt from garbage collection, and free memory goes back to the system once a minute.
    """
    try:
        import uvloop
    except ImportError:  # not on this platform
        runner = asyncio.run
    else:
        runner = uvloop.run
    # Libraries in C and Rust end the process without a word when memory is used up.
    if not faulthandler.is_enabled():
        faulthandler.enable()
    with frozen_heap():
        runner(_await(main))


async def _await(main: Callable[[], Awaitable[None]]) -> None:
    giving_back = asyncio.create_task(give_memory_back())
    try:
        await main()
    finally:
        giving_back.cancel()


def status_code_name(code: int) -> str:
    """Name of a google.rpc.Code; its number if it is none."""
    name: str = code_pb2.Code.Name(code) if code in code_pb2.Code.values() else f"code {code}"
    return name
