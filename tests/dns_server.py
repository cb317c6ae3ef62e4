"""A DNS server of this machine whose answers change: `dns://HOST:PORT/NAME:PORT` is a target of gRPC that asks it."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import socket
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

_A, _IN = 1, 1
# Flags of an answer: without an error, where the server has failed, and where there is no such name.
_FOUND, _SERVFAIL, _NO_SUCH_NAME = 0x8180, 0x8182, 0x8183
_ERROR_BITS = 0x000F


class Outage(enum.Enum):
    """How a server fails: it says so for every name, or it says nothing."""

    SERVFAIL = "SERVFAIL"
    SILENCE = "silence"


class DnsServer(asyncio.DatagramProtocol):
    """Answers with `names`: IPv4 addresses by name, in this order; a name that is not there does not exist."""

    def __init__(self) -> None:
        self.names: dict[str, Sequence[str]] = {}
        self.outage: Outage | None = None
        self.num_asked = 0
        self.address = ""

    def target(self, name: str, port: int) -> str:
        """The target of gRPC for a name."""
        return f"dns://{self.address}/{name}:{port}"

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self.address = f"127.0.0.1:{transport.get_extra_info('sockname')[1]}"

    def datagram_received(self, data: bytes, addr: Any) -> None:
        self.num_asked += 1
        if self.outage is Outage.SILENCE:
            return
        labels, place = [], 12
        while length := data[place]:
            labels.append(data[place + 1 : place + 1 + length].decode().lower())
            place += 1 + length
        question = data[12 : place + 5]
        kind, _ = struct.unpack("!HH", question[-4:])
        addresses = self.names.get(".".join(labels))
        flags = _NO_SUCH_NAME if addresses is None else _FOUND
        if self.outage is Outage.SERVFAIL:
            flags, addresses = _SERVFAIL, None
        answers = [socket.inet_aton(one) for one in addresses or ()] if kind == _A else []
        head = data[:2] + struct.pack("!HHHHH", flags, 1, len(answers), 0, 0)
        records = [b"\xc0\x0c" + struct.pack("!HHIH", _A, _IN, 0, 4) + one for one in answers]
        self._transport.sendto(head + question + b"".join(records), addr)


@contextlib.asynccontextmanager
async def dns_server() -> AsyncIterator[DnsServer]:
    """A server that knows no name yet."""
    loop = asyncio.get_running_loop()
    transport, server = await loop.create_datagram_endpoint(DnsServer, local_addr=("127.0.0.1", 0))
    try:
        yield server
    finally:
        transport.close()


def getaddrinfo_of(server: DnsServer, num_tries: int) -> Callable[..., Any]:
    """`socket.getaddrinfo` of a machine whose resolver asks this server, once a second where it says nothing."""
    system = socket.getaddrinfo
    host, _, port = server.address.rpartition(":")

    def getaddrinfo(name: str, number: int, *rest: Any, **options: Any) -> list[Any]:
        if not name.endswith(".example"):
            return system(name, number, *rest, **options)
        labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
        query = struct.pack("!HHHHHH", 1, 0x0100, 1, 0, 0, 0) + labels + struct.pack("!BHH", 0, _A, _IN)
        with socket.socket(type=socket.SOCK_DGRAM) as asking:
            asking.settimeout(1.0)
            asking.connect((host, int(port)))
            answer = b""
            for _ in range(num_tries):
                asking.send(query)
                with contextlib.suppress(TimeoutError):
                    answer = asking.recv(512)
                    break
        if not answer:
            raise socket.gaierror(socket.EAI_AGAIN, "no answer")
        flags, _, count = struct.unpack("!HHH", answer[2:8])
        if error := flags & _ERROR_BITS:
            is_unknown = error == _NO_SUCH_NAME & _ERROR_BITS
            raise socket.gaierror(socket.EAI_NONAME if is_unknown else socket.EAI_AGAIN, "no address")
        records = [answer[len(query) + 16 * place :][12:16] for place in range(count)]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (socket.inet_ntoa(one), number)) for one in records]

    return getaddrinfo
