"""Certificates as files: refused with a reason, read again when they change, kept when the change makes no sense."""

from __future__ import annotations

import logging
import math
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
import trustme

from coppice.net.certificates import RETRY_S, Certificates, read_certificates
from coppice.net.tls import ChannelTls, ServerTls, TlsError, server_tls
from coppice.obs.metrics import Prefix
from tests.certificates import Directory, directory, issue
from tests.metrics import values


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def files(tmp_path: Path, authority: trustme.CA) -> Directory:
    return directory(tmp_path / "tls", authority)


@pytest.mark.parametrize(
    ("cert", "key", "client_ca", "complaint"),
    [
        ("c.pem", "", "", "TLS_KEY must be set"),
        ("", "k.pem", "", "TLS_CERT must be set"),
        ("", "", "ca.pem", "TLS_CERT must be set"),
        ("c.pem", "", "ca.pem", "TLS_KEY must be set"),
    ],
)
def test_half_of_it_is_refused_by_the_variable_that_is_missing(
    cert: str, key: str, client_ca: str, complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        server_tls(cert, key, client_ca, is_internal=False)


def test_nothing_is_plaintext_and_internal_services_need_to_know_their_callers() -> None:
    assert server_tls("", "", "", is_internal=True) is None
    assert server_tls("c.pem", "k.pem", "", is_internal=False) == ServerTls("c.pem", "k.pem")
    with pytest.raises(ValueError, match="TLS_CLIENT_CA must be set"):
        server_tls("c.pem", "k.pem", "", is_internal=True)


def test_a_caller_has_both_or_none_of_certificate_and_key() -> None:
    assert ChannelTls("ca.pem").files == {"ca": "ca.pem"}
    with pytest.raises(TlsError, match="key must be set"):
        ChannelTls("ca.pem", cert="c.pem")
    with pytest.raises(TlsError, match="cert must be set"):
        ChannelTls("ca.pem", key="k.pem")


def test_files_that_fit_are_taken_as_they_are(files: Directory) -> None:
    for tls in (files.mutual(), files.caller()):
        pems = Certificates(tls).current()
        assert pems.cert == Path(files.cert).read_bytes()
        assert pems.key == Path(files.key).read_bytes()
        assert pems.ca == Path(files.ca).read_bytes()
    assert "PRIVATE" not in repr(pems)


@pytest.mark.parametrize("part", ["cert", "key", "client_ca"])
@pytest.mark.parametrize(
    "content", [None, b"", b"no certificate\n", b"\xff\xfe"], ids=["missing", "empty", "text", "bytes"]
)
def test_a_file_that_cannot_be_used_is_named_by_its_variable(
    files: Directory, tmp_path: Path, part: str, content: bytes | None
) -> None:
    bad = tmp_path / "bad.pem"
    if content is not None:
        bad.write_bytes(content)
    paths = {"cert": files.cert, "key": files.key, "client_ca": files.ca, part: str(bad)}
    with pytest.raises(ValueError, match=f"^TLS_{part.upper()} .*bad.pem"):
        read_certificates(ServerTls(**paths), "TLS_")


def test_another_s_key_is_refused(files: Directory, tmp_path: Path, authority: trustme.CA) -> None:
    other = directory(tmp_path / "other", authority)
    with pytest.raises(TlsError, match="key does not match the certificate"):
        Certificates(ServerTls(files.cert, other.key))


def test_a_key_with_a_password_is_refused_without_asking_for_it(files: Directory, tmp_path: Path) -> None:
    locked = tmp_path / "locked.pem"
    command = ["openssl", "ec", "-in", files.key, "-aes128", "-passout", "pass:secret", "-out", str(locked)]
    subprocess.run(command, check=True, capture_output=True)
    with pytest.raises(TlsError, match="key "):
        Certificates(ServerTls(files.cert, str(locked)))


@pytest.mark.parametrize("side", ["server", "caller"])
@pytest.mark.parametrize("when", ["expired", "early"])
def test_a_certificate_that_is_not_valid_now_is_refused(
    tmp_path: Path, authority: trustme.CA, when: str, side: str
) -> None:
    invalid = directory(tmp_path / when, authority, **{when: True})
    text = "certificate has expired" if when == "expired" else "certificate is not yet valid"
    with pytest.raises(TlsError, match=rf"cert would be refused by every peer: .*{text}$"):
        Certificates(invalid.mutual() if side == "server" else invalid.caller())


def test_the_same_files_are_read_once_and_others_are_seen(files: Directory, authority: trustme.CA) -> None:
    certificates = Certificates(files.mutual())
    first = certificates.current()
    assert certificates.current() is first
    files.swap(issue(authority), authority)
    second = certificates.current()
    assert second.cert == Path(files.cert).read_bytes() != first.cert
    assert certificates.current() is second


def test_half_a_change_leaves_the_old_ones_and_says_so_once(
    files: Directory, authority: trustme.CA, caplog: pytest.LogCaptureFixture
) -> None:
    certificates = Certificates(files.mutual())
    first = certificates.current()
    fresh = issue(authority)
    with caplog.at_level(logging.WARNING):
        # By hand, one after the other, over what the link leads to.
        files.overwrite_cert(fresh)
        assert certificates.current() is first
        assert certificates.current() is first
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "PRIVATE" not in caplog.text
    files.overwrite_key(fresh)
    assert certificates.current().cert == fresh.cert_chain_pems[0].bytes()


def test_what_could_not_be_read_for_a_moment_is_read_later(
    files: Directory, authority: trustme.CA, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificates = Certificates(files.mutual())
    first = certificates.current()
    files.swap(issue(authority), authority)

    def fails(part: str, path: Path) -> bytes:
        raise TlsError(part, "cannot be read: too many files are open")

    with monkeypatch.context() as patched:
        patched.setattr("coppice.net.certificates._content", fails)
        assert certificates.current() is first
    # Not at every handshake.
    assert certificates.current() is first
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s + RETRY_S)
    assert certificates.current().cert == Path(files.cert).read_bytes()


@pytest.mark.parametrize("change", ["gone", "expired", "early"])
def test_what_cannot_be_used_leaves_the_old_ones(files: Directory, authority: trustme.CA, change: str) -> None:
    certificates = Certificates(files.mutual())
    first = certificates.current()
    if change == "gone":
        Path(files.key).unlink()
    else:
        files.swap(issue(authority, **{change: True}), authority)
    assert certificates.current() is first


def test_the_metric_is_the_end_of_the_certificate(tmp_path: Path, authority: trustme.CA) -> None:
    end = datetime(2068, 5, 6, 7, 8, 9, tzinfo=UTC)
    files = directory(tmp_path / "tls", authority)
    files.swap(authority.issue_cert("127.0.0.1", not_after=end), authority)
    server, caller = Certificates(files.mutual()), Certificates(files.anonymous())
    assert caller.current().not_after_s == math.inf
    own, key = Prefix("coppice_verifier_"), "coppice_verifier_certificate_expiry_timestamp_seconds,use=server"
    assert values(own.certificates(server=server, client=caller, nothing=None)) == {key: end.timestamp()}
    later = datetime(2069, 1, 1, tzinfo=UTC)
    files.swap(authority.issue_cert("127.0.0.1", not_after=later), authority)
    assert values(own.certificates(server=server)) == {key: later.timestamp()}
