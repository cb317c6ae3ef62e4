"""A TCP proxy between services in fault tests, which misbehaves as it is told."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import math
import random
import socket
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass

CHUNK_BYTES = 65_536
# Of one direction of a connection, on their way; who sends more has to wait.
MAX_CHUNKS = 64
# Turns of the event loop in which connections are told of that were accepted before.
_ACCEPT_TURNS = 3
# What a connection says that is to make no sense: no protocol of ours begins like this.
GARBAGE_BYTES = 512
# Closing a socket that lingers for no time at all resets its connection.
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Greeting(enum.Enum):
    """What becomes of new connections."""

    PASS = "pass"
    REFUSE = "refuse"
    GARBAGE = "garbage"


@dataclass(frozen=True, slots=True)
class Link:
    """What one direction of every connection is like. Bytes keep their order whatever it is.

    Raises ValueError if a value is out of range.
    """

    delay_s: float = 0.0
    # Each chunk takes up to this much longer, at random.
    jitter_s: float = 0.0
    bytes_per_s: float = math.inf
    # Nothing passes; what was sent meanwhile does afterwards, as behind packets that were lost.
    stalled: bool = False
    # Chance of a chunk to have one byte changed.
    flip_probability: float = 0.0

    def __post_init__(self) -> None:
        if not (0 <= self.delay_s < math.inf and 0 <= self.jitter_s < math.inf and self.bytes_per_s > 0):
            raise ValueError(f"delay and jitter must be at least 0 and bytes_per_s above 0, got {self}")
        if not 0 <= self.flip_probability <= 1:
            raise ValueError(f"flip_probability must be in [0, 1], got {self.flip_probability}")


CLEAN = Link()


class FaultProxy:
    """Passes bytes to a HOST:PORT and back. `up` is the way there, `down` the way back; both hold from now on."""

    def __init__(self, target: str, seed: int = 0) -> None:
        """The port of `target` may be one where nobody listens yet, or not all the time."""
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self.chance = random.Random(seed)
        self.up = CLEAN
        self.down = CLEAN
        self.greeting = Greeting.PASS
        self.address = ""
        self.num_connections = 0
        self._changed = asyncio.Event()
        self._open: dict[_Connection, asyncio.Task[None]] = {}

    @property
    def num_open(self) -> int:
        """Connections that are open now, half-open ones included."""
        return len(self._open)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[FaultProxy]:
        """Serve at `address`, a free port of this machine, while the context is open."""
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            # Those that were just accepted are told in the loop's next turns.
            for _ in range(_ACCEPT_TURNS):
                await asyncio.sleep(0)
            self.cut()
            # Some may wait for a link that is stalled.
            connections = list(self._open.values())
            for connection in connections:
                connection.cancel()
            await asyncio.gather(*connections, return_exceptions=True)

    def shape(self, up: Link = CLEAN, down: Link = CLEAN) -> None:
        """Set both directions; without arguments, nothing is wrong with them any more."""
        self.up, self.down = up, down
        self._changed.set()
        self._changed = asyncio.Event()

    def cut(self) -> None:
        """Reset every connection, at both ends."""
        for connection in self._open:
            connection.cut()

    def half_open(self) -> None:
        """Close every connection at the target's end only; at the other what is sent vanishes without an answer."""
        for connection in self._open:
            connection.half_open()

    async def flowing(self, is_up: bool) -> Link:
        """A direction's link, once it is not stalled."""
        while (link := self.up if is_up else self.down).stalled:
            await self._changed.wait()
        return link

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # The task is ours: of one that asyncio makes for a coroutine, it logs the cancelling as an error.
        self.num_connections += 1
        connection = _Connection(self, reader, writer)
        self._open[connection] = asyncio.create_task(self._serve(connection))

    async def _serve(self, connection: _Connection) -> None:
        try:
            if self.greeting is Greeting.PASS:
                await connection.serve(self._host, self._port)
            elif self.greeting is Greeting.GARBAGE:
                await connection.babble(self._host, self._port)
        except OSError:
            pass  # either end is gone, or the target was never there
        finally:
            connection.cut()
            del self._open[connection]


class _Connection:
    """Two sockets, the caller's and the target's."""

    def __init__(self, proxy: FaultProxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._proxy = proxy
        self._near = reader, writer
        self._far: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._is_half_open = False

    async def serve(self, host: str, port: int) -> None:
        """Pass bytes both ways until both sides have closed theirs, or the connection breaks."""
        self._far = await asyncio.open_connection(host, port)
        ways = [
            asyncio.create_task(self._pass(self._near[0], self._far[1], is_up=True)),
            asyncio.create_task(self._pass(self._far[0], self._near[1], is_up=False)),
        ]
        try:
            await asyncio.gather(*ways)
        except OSError:
            if not self._is_half_open:
                raise
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
        if self._is_half_open:
            while await self._near[0].read(CHUNK_BYTES):
                pass

    async def babble(self, host: str, port: int) -> None:
        """Say something to both ends that makes no sense, and hang up."""
        self._far = await asyncio.open_connection(host, port)
        for _, writer in (self._near, self._far):
            writer.write(b"\xff" + self._proxy.chance.randbytes(GARBAGE_BYTES))
            await writer.drain()
        # It should be read before the reset takes it away.
        await asyncio.sleep(0.01)

    def cut(self) -> None:
        """Reset both sockets."""
        _reset(self._near[1])
        if self._far is not None:
            _reset(self._far[1])

    def half_open(self) -> None:
        """Leave the caller with a connection to nobody."""
        if self._far is not None:
            self._is_half_open = True
            _reset(self._far[1])

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_up: bool) -> None:
        """One direction, until its end; the chunks of its queue have the times at which they arrive."""
        chunks: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(MAX_CHUNKS)
        # Where nobody takes chunks out any more, nobody may wait to put one in.
        ends = [
            asyncio.create_task(self._take(reader, chunks, is_up)),
            asyncio.create_task(self._deliver(chunks, writer, is_up)),
        ]
        try:
            await asyncio.gather(*ends)
        finally:
            for end in ends:
                end.cancel()

    async def _take(
        self, reader: asyncio.StreamReader, chunks: asyncio.Queue[tuple[float, bytes]], is_up: bool
    ) -> None:
        due_s, data = 0.0, b"."
        while data:
            data = await reader.read(CHUNK_BYTES)
            link = self._proxy.up if is_up else self._proxy.down
            arrival_s = asyncio.get_running_loop().time() + link.delay_s
            due_s = max(due_s, arrival_s + self._proxy.chance.uniform(0, link.jitter_s))
            await chunks.put((due_s, data))

    async def _deliver(
        self, chunks: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter, up: bool
    ) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due_s, data = await chunks.get()
            if (wait_s := due_s - loop.time()) > 0:
                await asyncio.sleep(wait_s)
            link = await self._proxy.flowing(up)
            if not data:
                break
            if link.flip_probability and self._proxy.chance.random() < link.flip_probability:
                data = self._flipped(data)
            if math.isfinite(link.bytes_per_s):
                await asyncio.sleep(len(data) / link.bytes_per_s)
            writer.write(data)
            await writer.drain()
        if not self._is_half_open:
            writer.write_eof()

    def _flipped(self, data: bytes) -> bytes:
        """One byte is another."""
        changed = bytearray(data)
        changed[self._proxy.chance.randrange(len(data))] ^= self._proxy.chance.randrange(1, 256)
        return bytes(changed)


def _reset(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    if sock is not None and sock.fileno() >= 0:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    writer.transport.abort()
