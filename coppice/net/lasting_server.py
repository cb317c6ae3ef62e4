"""gRPC server that survives a call with a non-UTF-8 method name, which ends gRPC's own.

grpc.aio decodes method names in the task that accepts calls; a decoding error ends the task, and the process goes on
without serving. A server that ends unasked is therefore rebuilt on the same ports; running calls on the old one may
finish. Used for verifiers and drafters reachable from this machine only; all others are guarded
(`coppice/net/guard/`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

import grpc

logger = logging.getLogger(__name__)

# Interval of checks in seconds: while calls run, gRPC does not report the end of the server.
LOOK_S = 0.25
# Seconds for running calls of a server that has ended: streams between services are long and reconnect elsewhere.
DRAIN_S = 60.0
# The operating system may take a moment to release a port.
_REBIND_S = 0.05


class LastingServer(grpc.aio.Server):
    """Applies handlers and ports to each server that `make` creates, one after the other."""

    def __init__(self, make: Callable[[], grpc.aio.Server]) -> None:
        self._make = make
        self._now = make()
        self._handlers: list[tuple[grpc.GenericRpcHandler, ...]] = []
        self._ports: list[Callable[[grpc.aio.Server], int]] = []
        self._following: asyncio.Task[None] | None = None
        # Ended servers with running calls.
        self._draining: dict[grpc.aio.Server, asyncio.Task[None]] = {}
        self._stopping = asyncio.Event()
        # Servers that ended unasked.
        self.num_ended = 0

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        """Serve these methods."""
        handlers = tuple(generic_rpc_handlers)
        self._now.add_generic_rpc_handlers(handlers)
        self._handlers.append(handlers)

    def add_insecure_port(self, address: str) -> int:
        """Listen in plaintext; returns the port."""
        port = self._now.add_insecure_port(address)
        same = _with_port(address, port)
        self._ports.append(lambda server: server.add_insecure_port(same))
        return port

    def add_secure_port(self, address: str, server_credentials: grpc.ServerCredentials) -> int:
        """Listen with TLS; returns the port."""
        port = self._now.add_secure_port(address, server_credentials)
        same = _with_port(address, port)
        self._ports.append(lambda server: server.add_secure_port(same, server_credentials))
        return port

    async def start(self) -> None:
        """Serve until `stop`."""
        await self._now.start()
        self._following = asyncio.create_task(self._follow(), name="server")

    async def stop(self, grace: float | None) -> None:
        """Accept no more calls; running ones have `grace` seconds to finish."""
        self._stopping.set()
        await self._now.stop(grace)
        if self._following is not None:
            await asyncio.wait({self._following})
        # It may have been replaced in the meantime.
        await asyncio.gather(self._now.stop(grace), *(server.stop(grace) for server in self._draining))
        await asyncio.gather(*self._draining.values())

    async def wait_for_termination(self, timeout: float | None = None) -> bool:  # noqa: ASYNC109  gRPC's own signature
        """Wait for `stop`; True if `timeout` seconds pass first."""
        try:
            async with asyncio.timeout(timeout):
                await self._stopping.wait()
        except TimeoutError:
            return True
        return False

    async def _follow(self) -> None:
        """Replace the server whenever it ends."""
        while not self._stopping.is_set():
            try:
                is_there = await self._now.wait_for_termination(LOOK_S)
                reason: object = "gRPC does not say why"
            except Exception as error:  # noqa: BLE001  any error: the server must be replaced
                is_there, reason = False, error
            if not is_there and not self._stopping.is_set():
                self.num_ended += 1
                logger.error("the gRPC server has ended, restarting it: %s", reason)
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
