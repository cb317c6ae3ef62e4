"""Certificates from files: checked before use, reloaded after changes."""

from __future__ import annotations

import logging
import math
import ssl
import threading
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

import grpc

from coppice.net.tls import ChannelTls, ServerTls, TlsError, settings_named

logger = logging.getLogger(__name__)

# Bound on steps of a handshake in memory.
_MOST_TURNS = 8
# Seconds after which files that could not be used are read again, changed or not.
RETRY_S = 1.0

# Identity of each file's version.
Stamps: TypeAlias = list[tuple[int, int, int] | None]


@dataclass(frozen=True, slots=True)
class Pems:
    """Contents of a consistent set of files."""

    cert: bytes | None = field(repr=False)
    key: bytes | None = field(repr=False)
    ca: bytes | None = field(repr=False)
    # End of the certificate's validity, in Unix time; infinite without one.
    not_after_s: float


class Certificates:
    """The files of one side of TLS. `current` checks for changes; safe on any thread.

    Kubernetes swaps a directory at once, others write file by file: an inconsistent set is not used, and the last
    consistent one stays.
    """

    def __init__(self, tls: ServerTls | ChannelTls) -> None:
        """Read the files for the first time.

        Raises:
            TlsError: a file cannot be read, is not PEM, has expired, or does not match the others.
        """
        self.tls = tls
        self._files = {part: Path(path) for part, path in tls.files.items()}
        self._lock = threading.Lock()
        # Before reading: a change in between is seen by the next check.
        self._stamp = self._stamps()
        self._pems = self._read()
        # Version that could not be used, and when to read it again.
        self._refused: Stamps | None = None
        self._retry_s = 0.0

    @property
    def server_name(self) -> str:
        """Name required of servers' certificates; empty for the host called."""
        return self.tls.name if isinstance(self.tls, ChannelTls) else ""

    def current(self) -> Pems:
        """Contents of the files; the same object until they change."""
        with self._lock:
            stamp = self._stamps()
            if stamp != self._stamp and (stamp != self._refused or time.monotonic() >= self._retry_s):
                self._renew(stamp)
            return self._pems

    def _renew(self, stamp: Stamps) -> None:
        try:
            self._pems = self._read()
        except TlsError as error:
            if stamp != self._refused:
                logger.warning("certificates have changed but cannot be used, the old ones stay: %s", error)
            # The same files may become readable: errors can be transient.
            self._refused, self._retry_s = stamp, time.monotonic() + RETRY_S
        else:
            self._stamp, self._refused = stamp, None
            logger.info("certificates have been read again; valid until %s", _date(self._pems.not_after_s))

    def _stamps(self) -> Stamps:
        return [_stamp(path) for path in self._files.values()]

    def _read(self) -> Pems:
        contents = {part: _content(part, path) for part, path in self._files.items()}
        not_after_s = math.inf
        for part in ("client_ca", "ca"):
            if part in self._files:
                _check_parses(part, self._files[part])
        if "cert" in self._files:
            _check_parses("cert", self._files["cert"])
            not_after_s = _not_after_s(self._files["cert"], self._files["key"], isinstance(self.tls, ServerTls))
        # The checks read the files again, so make sure that they have not changed.
        if contents != {part: _content(part, path) for part, path in self._files.items()}:
            raise TlsError("cert", "or another file has changed while it was read")
        return Pems(
            contents.get("cert"), contents.get("key"), contents.get("client_ca") or contents.get("ca"), not_after_s
        )


def read_certificates(tls: ServerTls | ChannelTls | None, settings: str) -> Certificates | None:
    """Certificates of a service with variables prefixed `settings`; None for plaintext.

    Raises:
        ValueError: a file is invalid; the message names the variable.
    """
    if tls is None:
        return None
    with settings_named(settings):
        return Certificates(tls)


def server_credentials(certificates: Certificates) -> grpc.ServerCredentials:
    """Credentials of a server, which checks its files at each handshake; open streams are not affected."""
    used = certificates.current()

    def renewed() -> Any:
        """None without changes, which gRPC's type stubs do not allow."""
        nonlocal used
        pems = certificates.current()
        if pems is used:
            return None
        used = pems
        return _configuration(pems)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(used), renewed, require_client_authentication=used.ca is not None
    )


def channel_credentials(pems: Pems) -> grpc.ChannelCredentials:
    """Credentials of a channel, fixed until it is closed."""
    return grpc.ssl_channel_credentials(pems.ca, pems.key, pems.cert)


def _configuration(pems: Pems) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pems.key or b"", pems.cert or b"")], pems.ca)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Identity of a file's version; changes if a link to it is replaced."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _content(part: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        hint = "; let this user read it" if isinstance(error, PermissionError) else ""
        raise TlsError(part, f"cannot be read: {error}{hint}") from error


def _check_parses(part: str, path: Path) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=path)
    except (ssl.SSLError, OSError) as error:
        raise TlsError(part, f"is not a certificate in PEM format: {path}: {error}") from error


def _not_after_s(cert: Path, key: Path, by_server: bool) -> float:
    """End of a certificate's validity in Unix time, by a handshake in memory with a peer that trusts it.

    Raises:
        TlsError: the key does not match, or peers would refuse the certificate.
    """
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    shows, sees = (server, client) if by_server else (client, server)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    # Trust this certificate, whatever its issuer.
    sees.load_verify_locations(cafile=cert)
    sees.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    sees.verify_mode = ssl.CERT_REQUIRED
    try:
        for context in {server, shows}:
            # With a password, OpenSSL would prompt for it on the terminal.
            context.load_cert_chain(cert, key, password="")
    except (ssl.SSLError, OSError) as error:
        raise TlsError("key", f"does not match the certificate, or is not a key: {key}: {error}") from error
    try:
        shown = _shake_hands(server, client)[0 if sees is server else 1].getpeercert()
    except ssl.SSLError as error:
        reason = getattr(error, "verify_message", None) or error
        raise TlsError("cert", f"would be refused by every peer: {cert}: {reason}") from error
    return ssl.cert_time_to_seconds(str((shown or {})["notAfter"]))


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> tuple[ssl.SSLObject, ssl.SSLObject]:
    """Both ends of a connection in memory, after the exchange of certificates."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        server.wrap_bio(to_server, to_client, server_side=True),
        client.wrap_bio(to_client, to_server),
    )
    for _ in range(_MOST_TURNS):
        over = [_advance(end) for end in reversed(ends)]
        if all(over):
            break
    return ends


def _advance(end: ssl.SSLObject) -> bool:
    """Whether its side of the handshake is complete."""
    try:
        end.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True


def _date(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat() if math.isfinite(unix_s) else "any time"
