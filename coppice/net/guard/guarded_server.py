"""gRPC server reachable only through its guard: on a Unix socket in a private directory."""

from __future__ import annotations

import shutil
import ssl
import tempfile
from collections.abc import Callable
from pathlib import Path

import grpc

from coppice.core.errors import UnavailableError
from coppice.net.guard.guard import Guard
from coppice.net.guard.limits import GuardLimits
from coppice.net.guard.pending import PendingCalls

# Unix socket paths have at most 107 bytes; the file name needs some of them.
_LONGEST_DIRECTORY = 80


class GuardedServer:
    """Starts a server and its guard, and stops them in order."""

    def __init__(
        self,
        server: grpc.aio.Server,
        limits: GuardLimits,
        context: Callable[[], ssl.SSLContext] | None = None,
        pending: PendingCalls | None = None,
    ) -> None:
        self.grpc = server
        self._limits = limits
        self._context = context
        self._pending = pending
        self._directory: Path | None = None
        self._guard: Guard | None = None

    async def start(self, address: str) -> int:
        """Serve at `host:port`; returns the port.

        Raises:
            UnavailableError: the address is taken or not local, or the socket cannot be created.
        """
        parent = tempfile.gettempdir()
        try:
            # Only accessible to this user.
            self._directory = Path(
                tempfile.mkdtemp(prefix="coppice-", dir=parent if len(parent) <= _LONGEST_DIRECTORY else "/tmp")
            )
        except OSError as error:
            raise UnavailableError(f"no place for a socket in {parent}: {error.strerror}") from error
        path = str(self._directory / "grpc")
        guard = Guard(path, self._limits, self._context, pending=self._pending)
        try:
            self.grpc.add_insecure_port(f"unix:{path}")
            await self.grpc.start()
            port = guard.listen(address)
        except (UnavailableError, RuntimeError) as error:
            await self.grpc.stop(None)
            self._remove_directory()
            raise error if isinstance(error, UnavailableError) else UnavailableError(str(error)) from error
        self._guard = guard
        return port

    async def stop(self, grace_s: float | None) -> None:
        """Accept no more connections, let calls finish for `grace_s` seconds, then end them."""
        if self._guard is not None:
            self._guard.stop_listening()
        await self.grpc.stop(grace_s)
        if self._guard is not None:
            await self._guard.stop()
        self._remove_directory()

    def _remove_directory(self) -> None:
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
