"""What rank 0 sends a worker arrives whole, and the end of it is seen."""

from __future__ import annotations

import socket
import threading

from verifier_svc.model.parallel.worker_processes import LENGTH_BYTES, PassReader


def framed(message: bytes) -> bytes:
    return len(message).to_bytes(LENGTH_BYTES, "little") + message


def test_messages_arrive_whole_and_in_order_however_they_are_cut() -> None:
    messages = [b"", b"x", bytes(range(256)) * 4096]
    stream = b"".join(framed(message) for message in messages)
    ours, theirs = socket.socketpair()

    def send() -> None:
        with ours:
            for start in range(0, len(stream), 99_991):
                ours.sendall(stream[start : start + 99_991])

    sender = threading.Thread(target=send)
    sender.start()
    with theirs:
        reader = PassReader(theirs)
        assert [reader.next() for _ in messages] == messages
        assert reader.next() is None
    sender.join()


def test_a_message_that_breaks_off_is_the_end() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        ours.sendall(framed(b"whole")[:-1])
    with theirs:
        assert PassReader(theirs).next() is None
