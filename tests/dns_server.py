"""A DNS server of this machine whose answers change: `dns://HOST:PORT/NAME:PORT` is a target of gRPC that asks it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Sequence
from typing import Any

_A, _IN = 1, 1
# Flags of an answer: without an error, and where there is no such name.
_FOUND, _NO_SUCH_NAME = 0x8180, 0x8183


class DnsServer(asyncio.DatagramProtocol):
    """Answers with `names`: IPv4 addresses by name, in this order; a name that is not there does not exist."""

    def __init__(self) -> None:
        self.names: dict[str, Sequence[str]] = {}
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
        labels, place = [], 12
        while length := data[place]:
            labels.append(data[place + 1 : place + 1 + length].decode().lower())
            place += 1 + length
        question = data[12 : place + 5]
        kind, _ = struct.unpack("!HH", question[-4:])
        addresses = self.names.get(".".join(labels))
        answers = [socket.inet_aton(one) for one in addresses or ()] if kind == _A else []
        head = data[:2] + struct.pack("!HHHHH", _NO_SUCH_NAME if addresses is None else _FOUND, 1, len(answers), 0, 0)
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
