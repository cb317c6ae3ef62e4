"""Metrics over TLS: for whom, with which certificate, and nobody waits for a stranger's handshake."""

from __future__ import annotations

import contextlib
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from coppice.net.certificates import Certificates
from coppice.net.tls import ServerTls
from coppice.obs.metrics import Prefix
from coppice.obs.metrics_server import MUTUAL, ON, MetricsServer
from tests.certificates import Directory, directory, issue

HOST = "127.0.0.1"
TIMEOUT_S = 30.0
# What a caller sees of it depends on when the connection ends.
REFUSED = (urllib.error.URLError, ssl.SSLError, ConnectionError)


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def files(tmp_path: Path, authority: trustme.CA) -> Directory:
    return directory(tmp_path / "server", authority)


@contextlib.contextmanager
def serving(tls: ServerTls, mode: str = ON) -> Iterator[int]:
    """A port of metrics."""
    server = MetricsServer(lambda: [Prefix("").gauge("mode", "Which.", 1.0)], HOST, 0, Certificates(tls), mode)
    try:
        yield server.port
    finally:
        server.stop()


def scrape(port: int, trusted: Directory, shown: Directory | None = None) -> str:
    context = ssl.create_default_context(cafile=trusted.ca)
    if shown is not None:
        context.load_cert_chain(shown.cert, shown.key)
    with urllib.request.urlopen(f"https://{HOST}:{port}/metrics", timeout=TIMEOUT_S, context=context) as answer:
        return answer.read().decode()


def serial(port: int, trusted: Directory) -> str:
    """The serial number of the certificate that a new connection gets."""
    context = ssl.create_default_context(cafile=trusted.ca)
    with (
        socket.create_connection((HOST, port), TIMEOUT_S) as plain,
        context.wrap_socket(plain, server_hostname=HOST) as encrypted,
    ):
        return str((encrypted.getpeercert() or {})["serialNumber"])


def test_whoever_trusts_the_certificate_may_read(files: Directory) -> None:
    # A CA of callers is for the service's own port.
    with serving(files.mutual()) as port:
        assert "mode 1.0" in scrape(port, files)


def test_plain_http_is_refused_and_the_next_caller_served(files: Directory) -> None:
    with serving(files.one_sided()) as port:
        with pytest.raises(REFUSED):
            urllib.request.urlopen(f"http://{HOST}:{port}/metrics", timeout=TIMEOUT_S)
        assert "mode 1.0" in scrape(port, files)


def test_where_callers_are_asked_only_those_with_a_certificate_may_read(
    files: Directory, tmp_path: Path, authority: trustme.CA
) -> None:
    caller, stranger = directory(tmp_path / "caller", authority), directory(tmp_path / "stranger", trustme.CA())
    with serving(files.mutual(), MUTUAL) as port:
        for shown in (None, stranger):
            with pytest.raises(REFUSED):
                scrape(port, files, shown)
        assert "mode 1.0" in scrape(port, files, caller)


def test_new_connections_get_a_new_certificate(files: Directory, authority: trustme.CA) -> None:
    with serving(files.one_sided()) as port:
        before = serial(port, files)
        assert serial(port, files) == before
        fresh = issue(authority)
        files.overwrite_key(fresh)
        # Half a change is none.
        assert serial(port, files) == before
        files.overwrite_cert(fresh)
        assert serial(port, files) != before


def test_the_callers_authority_changes_too(files: Directory, tmp_path: Path, authority: trustme.CA) -> None:
    old, successor = directory(tmp_path / "old", authority), trustme.CA()
    with serving(files.mutual(), MUTUAL) as port:
        assert "mode 1.0" in scrape(port, files, old)
        files.swap(issue(successor), successor)
        heir = directory(tmp_path / "heir", successor)
        assert "mode 1.0" in scrape(port, files, heir)
        with pytest.raises(REFUSED):
            scrape(port, files, old)


def test_nobody_waits_for_a_caller_that_says_nothing(files: Directory) -> None:
    with serving(files.one_sided()) as port, socket.create_connection((HOST, port)):
        assert "mode 1.0" in scrape(port, files)
