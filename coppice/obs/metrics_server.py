"""Metrics of a service over HTTP in Prometheus' format, collected at scrape time.

`prometheus_client` writes the format. Its own server does TLS handshakes on the accepting thread, where a silent
client blocks all others, and never reloads certificates; hence this server.
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

# Timeout for reading metrics from the event loop.
READ_TIMEOUT_S = 5.0
# Seconds after which silent clients are disconnected, also in a handshake.
SILENCE_S = 10.0
# METRICS_TLS: plain HTTP; HTTPS; HTTPS with client certificates of TLS_CLIENT_CA.
OFF, ON, MUTUAL = "off", "on", "mutual"


def check_metrics_tls(mode: str, tls: ServerTls | None) -> None:
    """Check that the files for a mode of METRICS_TLS are set.

    Raises:
        ValueError: a file is missing; the message names the variable.
    """
    if mode != OFF and tls is None:
        raise ValueError(f"METRICS_TLS={mode} needs TLS_CERT and TLS_KEY")
    if mode == MUTUAL and tls is not None and not tls.client_ca:
        raise ValueError(f"METRICS_TLS={mode} needs TLS_CLIENT_CA, whose certificates callers must show")


class MetricsServer:
    """Serves the metrics of `read` under /metrics from its own threads, on which `read` must be safe."""

    def __init__(
        self, read: Read, host: str, port: int, certificates: Certificates | None = None, mode: str = OFF
    ) -> None:
        """Bind and serve; port 0 picks a free one. `mode` is METRICS_TLS; all but OFF need `certificates`.

        Raises:
            UnavailableError: the address is taken or not local.
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
    """Serve metrics while the context is open, on the host of the service's listen address.

    Raises:
        UnavailableError: the address is taken or not local.
    """
    server = MetricsServer(read, listen_address.rpartition(":")[0].strip("[]"), port, certificates, mode)
    try:
        yield
    finally:
        server.stop()


def on_event_loop(read: Read) -> Read:
    """`read` for any thread: it runs on the current event loop, between callbacks, so its values are consistent."""
    loop = asyncio.get_running_loop()

    async def collect() -> list[Metric]:
        return list(read())

    def call() -> Iterable[Metric]:
        return asyncio.run_coroutine_threadsafe(collect(), loop).result(READ_TIMEOUT_S)

    return call


class _Handler(WSGIRequestHandler):
    """One request, without logging."""

    timeout = SILENCE_S

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


class _HttpServer(ThreadingMixIn, WSGIServer):
    """One thread per connection, handshake included, so that clients do not wait for each other."""

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
        """Ignore clients that are gone; failed reads were answered with an error."""
        logger.debug("a caller of metrics got no answer: %s", sys.exc_info()[1])


class _Collector(Collector):
    """Collector that merges metrics of one name, as the format requires."""

    def __init__(self, read: Read) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for metric in self._read():
            first = families.setdefault(metric.name, metric)
            if first is not metric:
                first.samples.extend(metric.samples)
        return families.values()
