"""TLS contexts of Python's `ssl` from a service's certificates."""

from __future__ import annotations

import logging
import ssl
import threading
from collections.abc import Sequence

from coppice.net.certificates import Certificates, Pems

logger = logging.getLogger(__name__)


class ServerContexts:
    """TLS context of the current certificates. Safe on any thread."""

    def __init__(self, certificates: Certificates, *, asks_client: bool, protocols: Sequence[str] = ()) -> None:
        """`asks_client` requires client certificates of TLS_CLIENT_CA; `protocols` are for ALPN."""
        self._certificates = certificates
        self._asks_client = asks_client
        self._protocols = list(protocols)
        self._lock = threading.Lock()
        self._pems = certificates.current()
        self._context = self._made(self._pems)

    def current(self) -> ssl.SSLContext:
        """Context for a new connection; another one after the files change."""
        pems = self._certificates.current()
        with self._lock:
            if pems is not self._pems:
                try:
                    self._context = self._made(pems)
                    self._pems = pems
                except (ssl.SSLError, OSError) as error:  # changed again in between: retried by the next connection
                    logger.warning("the old certificate stays in use: %s", error)
            return self._context

    def _made(self, pems: Pems) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # `ssl` only takes a pair from files; they were checked before.
        files = self._certificates.tls
        context.load_cert_chain(files.cert, files.key, password="")
        if self._protocols:
            context.set_alpn_protocols(self._protocols)
        if self._asks_client:
            context.load_verify_locations(cadata=(pems.ca or b"").decode())
            context.verify_mode = ssl.CERT_REQUIRED
        return context
