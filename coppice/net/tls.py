"""TLS files: of a server (certificate, key, CA of clients) and of a caller (CA of servers, certificate, key)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass


class TlsError(ValueError):
    """A TLS file is missing, unreadable, or does not match the others; `part` is its field."""

    def __init__(self, part: str, reason: str) -> None:
        super().__init__(f"{part} {reason}")
        self.part = part
        self.reason = reason


@dataclass(frozen=True, slots=True)
class ServerTls:
    """PEM files of a server: certificate chain, key, and CA of clients.

    With a client CA, clients must show a certificate issued by it; without one, all clients are served.

    Raises:
        TlsError: a certificate or key without the other, or a client CA without them.
    """

    cert: str
    key: str
    client_ca: str = ""

    def __post_init__(self) -> None:
        _require_pair(self.cert, self.key)
        if not self.cert:
            raise TlsError("cert", "must be set with client_ca")

    @property
    def files(self) -> dict[str, str]:
        """The given files by field."""
        return _given(cert=self.cert, key=self.key, client_ca=self.client_ca)


@dataclass(frozen=True, slots=True)
class ChannelTls:
    """PEM files of a caller: CA of servers, and the certificate and key shown on request.

    Without a CA, servers need a certificate of a public CA known to gRPC.

    Raises:
        TlsError: a certificate or key without the other.
    """

    ca: str = ""
    cert: str = ""
    key: str = ""
    # Name required of servers' certificates, if not the host called.
    name: str = ""

    def __post_init__(self) -> None:
        _require_pair(self.cert, self.key)

    @property
    def files(self) -> dict[str, str]:
        """The given files by field."""
        return _given(cert=self.cert, key=self.key, ca=self.ca)


def server_tls(cert: str, key: str, client_ca: str, *, is_internal: bool) -> ServerTls | None:
    """TLS files from TLS_CERT, TLS_KEY and TLS_CLIENT_CA; None if all are empty.

    Internal services require client certificates, and so a client CA.

    Raises:
        ValueError: they are inconsistent; the message names the variable.
    """
    if not (cert or key or client_ca):
        return None
    with settings_named("TLS_"):
        if is_internal and not client_ca:
            raise TlsError("client_ca", "must be set with TLS_CERT: callers need a certificate")
        return ServerTls(cert, key, client_ca)


@contextlib.contextmanager
def settings_named(prefix: str) -> Iterator[None]:
    """Turn TlsErrors into ValueErrors that name the variable: prefix and part in capitals."""
    try:
        yield
    except TlsError as error:
        raise ValueError(f"{prefix}{error.part.upper()} {error.reason}") from error


def _require_pair(cert: str, key: str) -> None:
    if cert and not key:
        raise TlsError("key", "must be set with a certificate")
    if key and not cert:
        raise TlsError("cert", "must be set with a key")


def _given(**files: str) -> dict[str, str]:
    return {part: path for part, path in files.items() if path}
