"""TLS contexts of Python's own `ssl`, made of the certificates that a service serves with."""

from __future__ import annotations

import logging
import ssl
import threading
from collections.abc import Sequence

from coppice.net.certificates import Certificates, Pems

logger = logging.getLogger(__name__)


class ServerContexts:
    """What handshakes are done with: a context of the certificates of now. Safe on any thread."""

    def __init__(self, certificates: Certificates, *, asks_client: bool, protocols: Sequence[str] = ()) -> None:
        """With `asks_client` callers have to show a certificate of TLS_CLIENT_CA; `protocols` are those of ALPN."""
        self._certificates = certificates
        self._asks_client = asks_client
        self._protocols = list(protocols)
        self._lock = threading.Lock()
        self._pems = certificates.current()
        self._context = self._made(self._pems)

    def current(self) -> ssl.SSLContext:
        """The context for a connection that begins now; another one once the files have changed."""
        pems = self._certificates.current()
        with self._lock:
            if pems is not self._pems:
                try:
                    self._context = self._made(pems)
                    self._pems = pems
                except (ssl.SSLError, OSError) as error:  # changed again, and half done: the next connection sees
                    logger.warning("the old certificate stays: %s", error)
            return self._context

    def _made(self, pems: Pems) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # It takes a pair by its files alone; they have just been found to fit.
        files = self._certificates.tls
        context.load_cert_chain(files.cert, files.key, password="")
        if self._protocols:
            context.set_alpn_protocols(self._protocols)
        if self._asks_client:
            context.load_verify_locations(cadata=(pems.ca or b"").decode())
            context.verify_mode = ssl.CERT_REQUIRED
        return context
