"""Listening sockets, and their connections, which are accepted one at a time."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import socket
import ssl
import sys
from collections.abc import Callable

from coppice.core.errors import UnavailableError

logger = logging.getLogger(__name__)

_BACKLOG = 1024
_HANDSHAKE_S = 10.0
# Refused connections between two turns of the event loop.
_REFUSALS = 16
# States of a connection (Linux, tcp_states.h) whose client has closed it, and how the system is asked for one.
_CLOSED, _CLOSE_WAIT = 7, 8
_TCP_INFO = getattr(socket, "TCP_INFO", None) if sys.platform == "linux" else None
# Pause after a failure to accept, for example without file descriptors.
_RETRY_S = 0.05


def listen(address: str) -> list[socket.socket]:
    """Listening sockets for `host:port`: one per address of the host, all on one port.

    Raises:
        UnavailableError: the address is taken or not local.
    """
    host, _, text = address.rpartition(":")
    host, port = host.strip("[]"), int(text)
    listeners: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        with contextlib.ExitStack() as stack:
            for family, kind, protocol, _, place in dict.fromkeys(found):
                listener = stack.enter_context(socket.socket(family, kind, protocol))
                # Allows reusing the port of a server that has just ended, not of a running one.
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    # As gRPC does: the IPv6 wildcard address also accepts IPv4.
                    only_6 = not ipaddress.ip_address(str(place[0]).partition("%")[0]).is_unspecified
                    listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, only_6)
                listener.bind((place[0], port, *place[2:]))
                listener.listen(_BACKLOG)
                listener.setblocking(False)
                port = listener.getsockname()[1]
                listeners.append(listener)
            stack.pop_all()
    except OSError as error:
        raise UnavailableError(f"cannot listen at {address}: {error.strerror or error}") from error
    return listeners


async def accept(listener: socket.socket, takes: Callable[[socket.socket, str, int], bool]) -> None:
    """Offer each connection to `takes`, with its host and port, until the listener is closed; close those it refuses.

    Connections that their clients have closed already are not offered: beginning them would take the time of others.

    A flood of connects must not monopolise the loop: others' work is done after each connection that is taken, and
    after some that are refused, so that a newcomer does not wait for a turn of the loop for each one before it.
    """
    num_refused = 0
    while True:
        try:
            client, (host, port, *_) = await _accepted(listener)
        except OSError as error:
            if error.errno == errno.EBADF:
                return  # closed
            logger.warning("accepting a connection failed: %s", error)
            await asyncio.sleep(_RETRY_S)
            continue
        if _has_left(client) or not takes(client, host, port):
            client.close()
            num_refused += 1
            if num_refused % _REFUSALS:
                continue
        await asyncio.sleep(0)


def _has_left(client: socket.socket) -> bool:
    """Whether the client has closed the connection, as far as the system tells."""
    if _TCP_INFO is None:
        return False
    try:
        return client.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 1)[0] in (_CLOSED, _CLOSE_WAIT)
    except OSError:
        return False


async def _accepted(listener: socket.socket) -> tuple[socket.socket, tuple[str, int]]:
    try:
        client, address = listener.accept()
    except BlockingIOError:
        return await asyncio.get_running_loop().sock_accept(listener)
    client.setblocking(False)
    return client, address


async def begin(
    client: socket.socket, protocol: Callable[[], asyncio.BaseProtocol], context: ssl.SSLContext | None
) -> bool:
    """Connect an accepted socket to a protocol, after a TLS handshake with a context; False if that failed.

    Cancelling evicts it, which is a failure, too.
    """
    try:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.get_running_loop().connect_accepted_socket(
            protocol, client, ssl=context, ssl_handshake_timeout=None if context is None else _HANDSHAKE_S
        )
    except (OSError, asyncio.CancelledError) as error:
        # A failed handshake is the client's error, and TLS has told it.
        logger.info("a connection failed to start: %s", error or "its handshake was evicted")
        client.close()
        return False
    return True
