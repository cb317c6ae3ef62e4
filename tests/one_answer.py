"""A server of one answer, whatever it is asked."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def answering(answer: bytes) -> Iterator[tuple[str, list[bytes]]]:
    """A listener that answers its first request with these bytes and closes; its address and what it was sent."""
    sent: list[bytes] = []

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            sent.append(connection.recv(1 << 16))
            connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}", sent
        thread.join(10)
