"""An HTTP client on raw sockets, and gateways in this process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from coppice.gateway.app import running
from coppice.gateway.config import GatewayConfig


@contextlib.asynccontextmanager
async def gateway_to(orchestrator: str, **settings: Any) -> AsyncIterator[str]:
    """A gateway on a free port; gives HOST:PORT."""
    config = GatewayConfig(
        **{"listen_address": "127.0.0.1:0", "orchestrator_address": orchestrator, "grace_s": 0.0, **settings}
    )
    async with running(config) as gateway:
        yield gateway.address


@dataclass(frozen=True)
class Answered:
    """A whole answer; a chunked body is put together."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def content(self) -> Any:
        """The JSON of the body."""
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        """The error in OpenAI's shape."""
        return self.content["error"]

    @property
    def events(self) -> list[Any]:
        """The events of a stream before `[DONE]`, which has to be the last."""
        *events, done, rest = self.body.decode().split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events if not event.startswith(":")]


def request_bytes(method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> bytes:
    """A request that closes its connection unless `headers` say otherwise."""
    all_headers = {
        "host": "test",
        "connection": "close",
        "content-type": "application/json",
        "content-length": str(len(body)),
        **(headers or {}),
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in all_headers.items())
    return f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode("latin-1") + body


async def opened(address: str, receive_buffer: int = 0) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection; its buffer for what is not read has these bytes, 0 for the system's own number."""
    host, _, port = address.rpartition(":")
    client = socket.socket()
    client.setblocking(False)
    if receive_buffer:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    await asyncio.get_running_loop().sock_connect(client, (host, int(port)))
    return await asyncio.open_connection(sock=client)


async def head_of(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Status and headers of an answer."""
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    pairs = (line.lower().partition(": ") for line in lines[1:-2])
    return int(lines[0].split()[1]), {name: value for name, _, value in pairs}


async def chunk_of(reader: asyncio.StreamReader) -> bytes:
    """The next chunk of a chunked body; empty at its end."""
    size = int(await reader.readuntil(b"\r\n"), 16)
    return (await reader.readexactly(size + 2))[:-2]


async def exchanged(address: str, request: bytes) -> Answered:
    """Send bytes and read one answer."""
    reader, writer = await opened(address)
    try:
        writer.write(request)
        status, headers = await head_of(reader)
        if headers.get("transfer-encoding") == "chunked":
            parts = []
            while part := await chunk_of(reader):
                parts.append(part)
            return Answered(status, headers, b"".join(parts))
        return Answered(status, headers, await reader.readexactly(int(headers.get("content-length", 0))))
    finally:
        writer.close()


async def post(address: str, path: str, fields: Any, **headers: str) -> Answered:
    """Post an object as JSON; underscores in names of headers are hyphens."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return await exchanged(address, request_bytes("POST", path, json.dumps(fields).encode(), named))


async def get(address: str, path: str, **headers: str) -> Answered:
    """Get a page; underscores in names of headers are hyphens."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return await exchanged(address, request_bytes("GET", path, headers=named))
