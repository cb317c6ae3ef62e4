"""Metrics of a service over HTTP, in the format of Prometheus: read when they are asked for, free in between.

`prometheus_client` writes the format. Its own server does handshakes of TLS on the thread that accepts, where a silent
caller holds up all others, and never reads a renewed certificate; so sockets are served here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
import threading
from collections.abc import Iterable, Iterator
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import make_wsgi_app
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

from coppice.core.errors import UnavailableError
from coppice.net.certificates import Certificates
from coppice.net.server_contexts import ServerContexts
from coppice.net.tls import ServerTls
from coppice.obs.metrics import Read

logger = logging.getLogger(__name__)

# An event loop that does not answer a scrape by then has other worries.
READ_TIMEOUT_S = 5.0
# A caller that says nothing for so long is hung up on, in a handshake too.
SILENCE_S = 10.0
# METRICS_TLS: plain HTTP; HTTPS for everybody; HTTPS for those who show a certificate of TLS_CLIENT_CA.
OFF, ON, MUTUAL = "off", "on", "mutual"


def check_metrics_tls(mode: str, tls: ServerTls | None) -> None:
    """See that there are the files that a mode of METRICS_TLS takes.

    Raises:
        ValueError: there are not; the message names the variable.
    """
    if mode != OFF and tls is None:
        raise ValueError(f"METRICS_TLS={mode} needs TLS_CERT and TLS_KEY")
    if mode == MUTUAL and tls is not None and not tls.client_ca:
        raise ValueError(f"METRICS_TLS={mode} needs TLS_CLIENT_CA, whose certificates callers have to show")


class MetricsServer:
    """Serves what `read` returns under /metrics, from threads of its own: `read` must be safe on them."""

    def __init__(
        self, read: Read, host: str, port: int, certificates: Certificates | None = None, mode: str = OFF
    ) -> None:
        """Bind and serve; port 0 picks a free one. `mode` is that of METRICS_TLS, and but for OFF takes `certificates`.

        Raises:
            UnavailableError: the address is taken or none of this machine's.
        """
        registry = CollectorRegistry()
        registry.register(_Collector(read))
        contexts = None
        if certificates is not None and mode != OFF:
            contexts = ServerContexts(certificates, asks_client=mode == MUTUAL)
        try:
            self._server = _HttpServer(host, port, contexts)
        except OSError as error:
            raise UnavailableError(f"cannot serve metrics at {host}:{port}: {error}") from error
        self._server.set_app(make_wsgi_app(registry))
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()
        self.port: int = self._server.server_port

    def stop(self) -> None:
        """Stop serving and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextlib.contextmanager
def serving_metrics(
    read: Read, listen_address: str, port: int, certificates: Certificates | None = None, mode: str = OFF
) -> Iterator[None]:
    """Serve metrics until the context is left, on the host of the address that the service listens at.

    Raises:
        UnavailableError: the address is taken or none of this machine's.
    """
    server = MetricsServer(read, listen_address.rpartition(":")[0].strip("[]"), port, certificates, mode)
    try:
        yield
    finally:
        server.stop()


def on_event_loop(read: Read) -> Read:
    """`read` for any thread: it runs on the event loop that runs now, between callbacks, so that what it sees holds."""
    loop = asyncio.get_running_loop()

    async def collect() -> list[Metric]:
        return list(read())

    def call() -> Iterable[Metric]:
        return asyncio.run_coroutine_threadsafe(collect(), loop).result(READ_TIMEOUT_S)

    return call


class _Handler(WSGIRequestHandler):
    """One request. Nothing is logged of it."""

    timeout = SILENCE_S

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


class _HttpServer(ThreadingMixIn, WSGIServer):
    """A thread per connection, which does the handshake, too: nobody waits for another's."""

    daemon_threads = True

    def __init__(self, host: str, port: int, contexts: ServerContexts | None) -> None:
        [(self.address_family, _, _, _, address), *_] = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        self._contexts = contexts
        super().__init__((str(address[0]), port), _Handler)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve one connection."""
        if self._contexts is not None:
            request.settimeout(SILENCE_S)
            try:
                request = self._contexts.current().wrap_socket(request, server_side=True)
            except OSError as error:
                logger.debug("a handshake for metrics failed: %s", error)
                self.shutdown_request(request)
                return
        super().process_request_thread(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A caller that is gone is no fault of ours, and a failed read has been told to it."""
        logger.debug("a caller of metrics got no answer: %s", sys.exc_info()[1])


class _Collector(Collector):
    """What is read, metrics of one name together, as the format wants it."""

    def __init__(self, read: Read) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for metric in self._read():
            first = families.setdefault(metric.name, metric)
            if first is not metric:
                first.samples.extend(metric.samples)
        return families.values()
