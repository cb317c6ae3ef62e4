"""Ranks 1 and up as child processes of rank 0: start, passes, monitoring, stop.

A worker reads passes from a socket, and stops when it is closed or its parent is gone. Without a worker the target is
incomplete, so rank 0 ends at once, to be restarted by its supervisor.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

from verifier_svc.config import CONFIGURATION_ERROR, WORKER_LOST

logger = logging.getLogger(__name__)

LENGTH_BYTES = 8
# Grace period of a worker after the socket is closed.
_STOP_S = 5.0
# Time to wait for a worker's exit after a failed pass, to report it as the reason.
_BLAME_S = 2.0


class Workers:
    """Ranks 1 to `size` - 1. They rendezvous in `directory`; sending times out after `timeout_s`."""

    def __init__(self, size: int, directory: Path, timeout_s: float) -> None:
        self._directory = directory
        self._stopping = False
        self._failing = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        for rank in range(1, size):
            ours, theirs = socket.socketpair()
            ours.settimeout(timeout_s)
            arguments = [str(rank), str(os.getpid()), str(theirs.fileno()), str(directory)]
            process = subprocess.Popen(
                [sys.executable, "-m", "verifier_svc.model.parallel.tensor_worker", *arguments],
                stdin=subprocess.DEVNULL,
                # Rank 0's standard output has only the ready line.
                stdout=sys.stderr,
                pass_fds=[theirs.fileno()],
                # Read by transformers as the accelerator's index.
                env={**os.environ, "LOCAL_RANK": str(rank)},
            )
            theirs.close()
            logger.info("rank %d is process %d", rank, process.pid)
            self._sockets.append(ours)
            self._processes.append(process)
        for rank in range(1, size):
            threading.Thread(target=self._watch, args=(rank,), name=f"rank-{rank}", daemon=True).start()

    def send(self, message: bytes) -> None:
        """Send every worker a message.

        Raises:
            OSError: a worker is gone, or has not read for too long.
        """
        framed = len(message).to_bytes(LENGTH_BYTES, "little") + message
        for worker in self._sockets:
            worker.sendall(framed)

    def fail(self, reason: str) -> NoReturn:
        """End this process and the workers at once; the reason is a worker's exit, if there was one."""
        with self._failing:
            until_s = time.monotonic() + _BLAME_S
            while not (ended := self._ended()) and time.monotonic() < until_s:
                time.sleep(0.01)
            logger.error("the target is incomplete, ending: %s", ended or reason)
            for process in self._processes:
                process.kill()
            shutil.rmtree(self._directory, ignore_errors=True)
            # A configuration error of a worker is one of this process.
            codes = {process.wait() for process in self._processes}
            os._exit(CONFIGURATION_ERROR if CONFIGURATION_ERROR in codes else WORKER_LOST)

    def stop(self) -> None:
        """Stop the workers and wait for them."""
        self._stopping = True
        for worker in self._sockets:
            worker.close()
        for process in self._processes:
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _watch(self, rank: int) -> None:
        self._processes[rank - 1].wait()
        if not self._stopping:
            self.fail(f"rank {rank} ended")

    def _ended(self) -> str:
        """Workers that ended, with exit codes; empty if none."""
        codes = {rank: process.poll() for rank, process in enumerate(self._processes, 1)}
        return ", ".join(f"rank {rank} ended with exit code {code}" for rank, code in codes.items() if code is not None)


class PassReader:
    """A worker's end of the socket; the caller closes it."""

    def __init__(self, source: socket.socket) -> None:
        self._socket = source

    def next(self) -> bytearray | None:
        """Wait for the next message; None at the end of the stream."""
        header = self._read(LENGTH_BYTES)
        return None if header is None else self._read(int.from_bytes(header, "little"))

    def _read(self, size: int) -> bytearray | None:
        message = bytearray(size)
        view = memoryview(message)
        while view:
            count = self._socket.recv_into(view)
            if count == 0:
                return None
            view = view[count:]
        return message
