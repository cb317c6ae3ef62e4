"""The files of TLS: a server's certificate, key and clients' CA; a caller's CA of servers and its pair."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass


class TlsError(ValueError):
    """A file of TLS is missing, cannot be read, or does not fit the others; `part` is the field that names it."""

    def __init__(self, part: str, reason: str) -> None:
        super().__init__(f"{part} {reason}")
        self.part = part
        self.reason = reason


@dataclass(frozen=True, slots=True)
class ServerTls:
    """PEM files of a server: its certificate with what leads to the CA, the key, and the CA of clients.

    With a client CA, clients have to show a certificate of that CA's; without one anybody may call.

    Raises:
        TlsError: half a pair, or a client CA without one.
    """

    cert: str
    key: str
    client_ca: str = ""

    def __post_init__(self) -> None:
        _require_pair(self.cert, self.key)
        if not self.cert:
            raise TlsError("cert", "must be set where client_ca is")

    @property
    def files(self) -> dict[str, str]:
        """The files by their field; those that are not given are left out."""
        return _given(cert=self.cert, key=self.key, client_ca=self.client_ca)


@dataclass(frozen=True, slots=True)
class ChannelTls:
    """PEM files of a caller: the CA of servers, and the certificate and key that it shows where it is asked for them.

    Without a CA, that of a server has to be one of the public ones that gRPC knows.

    Raises:
        TlsError: half a pair.
    """

    ca: str = ""
    cert: str = ""
    key: str = ""
    # The name that servers' certificates have to have, where it is not the host that is called.
    name: str = ""

    def __post_init__(self) -> None:
        _require_pair(self.cert, self.key)

    @property
    def files(self) -> dict[str, str]:
        """The files by their field; those that are not given are left out."""
        return _given(cert=self.cert, key=self.key, ca=self.ca)


def server_tls(cert: str, key: str, client_ca: str, *, is_internal: bool) -> ServerTls | None:
    """What TLS_CERT, TLS_KEY and TLS_CLIENT_CA ask for; None where they are empty.

    An internal service speaks to nobody who shows no certificate, and so needs a CA of clients.

    Raises:
        ValueError: they do not fit together; the message names the variable.
    """
    if not (cert or key or client_ca):
        return None
    with settings_named("TLS_"):
        if is_internal and not client_ca:
            raise TlsError("client_ca", "must be set where TLS_CERT is: only callers with a certificate are served")
        return ServerTls(cert, key, client_ca)


@contextlib.contextmanager
def settings_named(prefix: str) -> Iterator[None]:
    """Errors of TLS become ValueErrors that name the variable: the prefix, and the part in capitals."""
    try:
        yield
    except TlsError as error:
        raise ValueError(f"{prefix}{error.part.upper()} {error.reason}") from error


def _require_pair(cert: str, key: str) -> None:
    if cert and not key:
        raise TlsError("key", "must be set where there is a certificate")
    if key and not cert:
        raise TlsError("cert", "must be set where there is a key")


def _given(**files: str) -> dict[str, str]:
    return {part: path for part, path in files.items() if path}
