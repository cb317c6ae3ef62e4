"""TLS for metrics: the certificate that a service serves with anyway, as Python's own `ssl` wants it."""

from __future__ import annotations

import logging
import ssl
import threading

from coppice.certificates import Certificates, Pems
from coppice.tls import ServerTls

logger = logging.getLogger(__name__)

# METRICS_TLS: plain HTTP; HTTPS for everybody; HTTPS for those who show a certificate of TLS_CLIENT_CA.
OFF, ON, MUTUAL = "off", "on", "mutual"
METRICS_TLS = (OFF, ON, MUTUAL)


def check_metrics_tls(mode: str, tls: ServerTls | None) -> None:
    """See that METRICS_TLS is a mode, and that there are the files that it takes.

    Raises:
        ValueError: it is none, or there are not; the message names the variable.
    """
    if mode not in METRICS_TLS:
        raise ValueError(f"METRICS_TLS must be one of {', '.join(METRICS_TLS)}, got {mode!r}")
    if mode != OFF and tls is None:
        raise ValueError(f"METRICS_TLS={mode} needs TLS_CERT and TLS_KEY")
    if mode == MUTUAL and tls is not None and not tls.client_ca:
        raise ValueError(f"METRICS_TLS={mode} needs TLS_CLIENT_CA, whose certificates callers have to show")


class MetricsContexts:
    """What handshakes are done with: a context of the certificates of now. Safe on any thread."""

    def __init__(self, certificates: Certificates, mode: str) -> None:
        """`mode` is ON or MUTUAL."""
        self._certificates = certificates
        self._mode = mode
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
                    logger.warning("metrics keep their old certificate: %s", error)
            return self._context

    def _made(self, pems: Pems) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # It takes a pair by its files alone; they have just been found to fit.
        files = self._certificates.tls
        context.load_cert_chain(files.cert, files.key, password="")
        if self._mode == MUTUAL:
            context.load_verify_locations(cadata=(pems.ca or b"").decode())
            context.verify_mode = ssl.CERT_REQUIRED
        return context
