"""A gRPC server that outlives what ends gRPC's own: one call whose method is no text.

gRPC decodes the method of every call in the one task that takes calls. Bytes that are not UTF-8 end that task, and with
it the server, for everybody: the process goes on, and nobody reaches it any more. So a server that has ended without
being asked to is built anew on the same ports; calls that were running on the old one end there in peace. Back ends
that this machine alone reaches are such servers; all others have a guard in front of them (`coppice/net/guard/`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

import grpc

logger = logging.getLogger(__name__)

# How often we look whether the server has ended: gRPC tells of it in no other way while calls are running.
LOOK_S = 0.25
# How long the calls of a server that has ended may go on: streams between services are long, and begin anew elsewhere.
DRAIN_S = 60.0
# The system may take a moment to give up a port.
_REBIND_S = 0.05


class LastingServer(grpc.aio.Server):
    """Everything that is added to it is added to each of the servers that `make` gives, one after the other."""

    def __init__(self, make: Callable[[], grpc.aio.Server]) -> None:
        self._make = make
        self._now = make()
        self._handlers: list[tuple[grpc.GenericRpcHandler, ...]] = []
        self._ports: list[Callable[[grpc.aio.Server], int]] = []
        self._following: asyncio.Task[None] | None = None
        # Servers that have ended, with calls that still run.
        self._draining: dict[grpc.aio.Server, asyncio.Task[None]] = {}
        self._stopping = asyncio.Event()
        # Servers that ended without being asked to.
        self.num_ended = 0

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        """Serve these methods, from the start on."""
        handlers = tuple(generic_rpc_handlers)
        self._now.add_generic_rpc_handlers(handlers)
        self._handlers.append(handlers)

    def add_insecure_port(self, address: str) -> int:
        """Listen there in plaintext, from the start on; returns the port."""
        port = self._now.add_insecure_port(address)
        same = _with_port(address, port)
        self._ports.append(lambda server: server.add_insecure_port(same))
        return port

    def add_secure_port(self, address: str, server_credentials: grpc.ServerCredentials) -> int:
        """Listen there with TLS, from the start on; returns the port."""
        port = self._now.add_secure_port(address, server_credentials)
        same = _with_port(address, port)
        self._ports.append(lambda server: server.add_secure_port(same, server_credentials))
        return port

    async def start(self) -> None:
        """Serve until `stop`."""
        await self._now.start()
        self._following = asyncio.create_task(self._follow(), name="server")

    async def stop(self, grace: float | None) -> None:
        """Take no more calls; those that run have `grace` seconds to end."""
        self._stopping.set()
        await self._now.stop(grace)
        if self._following is not None:
            await asyncio.wait({self._following})
        # Another may have taken its place while it was being stopped.
        await asyncio.gather(self._now.stop(grace), *(server.stop(grace) for server in self._draining))
        await asyncio.gather(*self._draining.values())

    async def wait_for_termination(self, timeout: float | None = None) -> bool:  # noqa: ASYNC109  gRPC's own signature
        """Return after `stop`; True when `timeout` seconds have passed before."""
        try:
            async with asyncio.timeout(timeout):
                await self._stopping.wait()
        except TimeoutError:
            return True
        return False

    async def _follow(self) -> None:
        """Whenever the server has ended, let another take its place."""
        while not self._stopping.is_set():
            try:
                is_there = await self._now.wait_for_termination(LOOK_S)
                reason: object = "gRPC does not say why"
            except Exception as error:  # noqa: BLE001  whatever has ended it, nobody else would start it again
                is_there, reason = False, error
            if not is_there and not self._stopping.is_set():
                self.num_ended += 1
                logger.error("gRPC has ended the server, which is started anew: %s", reason)
                await self._replace()

    async def _replace(self) -> None:
        self._drain(self._now)
        while not self._stopping.is_set():
            server = self._make()
            try:
                for handlers in self._handlers:
                    server.add_generic_rpc_handlers(handlers)
                for listen in self._ports:
                    listen(server)
                await server.start()
            except RuntimeError as error:
                logger.warning("the server cannot start again yet: %s", error)
                await asyncio.sleep(_REBIND_S)
            else:
                self._now = server
                return

    def _drain(self, server: grpc.aio.Server) -> None:
        task = self._draining[server] = asyncio.create_task(server.stop(DRAIN_S), name="draining server")
        task.add_done_callback(lambda _: self._draining.pop(server, None))


def _with_port(address: str, port: int) -> str:
    return f"{address.rpartition(':')[0]}:{port}"
