"""Certificates for tests: an authority that writes what it issues into a directory, as Kubernetes or by hand."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme

from coppice.net.tls import ChannelTls, ServerTls

HOST = "127.0.0.1"
LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)
FAR_OFF = datetime(2100, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Directory:
    """ca.pem, cert.pem and key.pem, behind a link that `swap` turns to others in one step."""

    path: Path

    @property
    def ca(self) -> str:
        return str(self.path / "ca.pem")

    @property
    def cert(self) -> str:
        return str(self.path / "cert.pem")

    @property
    def key(self) -> str:
        return str(self.path / "key.pem")

    def mutual(self) -> ServerTls:
        """A server that asks for certificates of the CA."""
        return ServerTls(self.cert, self.key, self.ca)

    def one_sided(self) -> ServerTls:
        """A server for everybody."""
        return ServerTls(self.cert, self.key)

    def caller(self, name: str = "") -> ChannelTls:
        """A caller that has a certificate."""
        return ChannelTls(self.ca, self.cert, self.key, name)

    def anonymous(self) -> ChannelTls:
        """A caller that has none."""
        return ChannelTls(self.ca)

    def contents(self) -> tuple[bytes, bytes, bytes]:
        """CA, key and certificate, in gRPC's order for a caller."""
        ca, key, cert = (Path(path).read_bytes() for path in (self.ca, self.key, self.cert))
        return ca, key, cert

    def overwrite_key(self, issued: trustme.LeafCert) -> None:
        """Half of a change by hand."""
        Path(self.key).write_bytes(issued.private_key_pem.bytes())

    def overwrite_cert(self, issued: trustme.LeafCert) -> None:
        """The other half."""
        Path(self.cert).write_bytes(issued.cert_chain_pems[0].bytes())

    def swap(self, issued: trustme.LeafCert, *authorities: trustme.CA) -> None:
        """Have other files there, all at once, as Kubernetes swaps a volume of a Secret."""
        version = next(number for number in itertools.count() if not (self.path / f"..{number}").exists())
        fresh = self.path / f"..{version}"
        fresh.mkdir()
        (fresh / "ca.pem").write_bytes(b"".join(authority.cert_pem.bytes() for authority in authorities))
        issued.private_key_pem.write_to_path(fresh / "key.pem")
        (fresh / "cert.pem").write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
        link = self.path / "..data.new"
        link.symlink_to(fresh.name)
        link.rename(self.path / "..data")
        for name in ("ca.pem", "cert.pem", "key.pem"):
            if not (self.path / name).is_symlink():
                (self.path / name).symlink_to(Path("..data") / name)


def directory(path: Path, authority: trustme.CA, *names: str, expired: bool = False, early: bool = False) -> Directory:
    """A directory with a certificate for 127.0.0.1, or for other names."""
    path.mkdir(exist_ok=True)
    made = Directory(path)
    made.swap(issue(authority, *names, expired=expired, early=early), authority)
    return made


def issue(authority: trustme.CA, *names: str, expired: bool = False, early: bool = False) -> trustme.LeafCert:
    """A certificate of an authority: one of today, one that has expired, or one that is not valid yet."""
    if not (expired or early):
        return authority.issue_cert(*(names or (HOST,)))
    begin = LONG_AGO if expired else FAR_OFF
    return authority.issue_cert(*(names or (HOST,)), not_before=begin, not_after=begin + timedelta(days=1))
