"""Ranks 1 and up as child processes of rank 0: started, told each pass, watched, stopped.

A worker reads passes from a socket, whose end is its signal to stop. It also ends when its parent is gone. When a
worker is gone the target is incomplete, so that rank 0 ends at once: whoever started it starts it anew.
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
# How long a worker may take to end once it has been told to.
_STOP_S = 5.0
# A pass that fails because a worker has ended is noticed before the worker's end: look for it this long.
_BLAME_S = 2.0


class Workers:
    """The other `size` - 1 ranks on this machine. They find each other in `directory`; sending takes `timeout_s`."""

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
                # Rank 0's output says one thing, when it is ready.
                stdout=sys.stderr,
                pass_fds=[theirs.fileno()],
                # Where transformers looks for the number of the accelerator.
                env={**os.environ, "LOCAL_RANK": str(rank)},
            )
            theirs.close()
            logger.info("rank %d is process %d", rank, process.pid)
            self._sockets.append(ours)
            self._processes.append(process)
        for rank in range(1, size):
            threading.Thread(target=self._watch, args=(rank,), name=f"rank-{rank}", daemon=True).start()

    def send(self, message: bytes) -> None:
        """Give every worker a message.

        Raises:
            OSError: one of them is gone, or has not read for too long.
        """
        framed = len(message).to_bytes(LENGTH_BYTES, "little") + message
        for worker in self._sockets:
            worker.sendall(framed)

    def fail(self, reason: str) -> NoReturn:
        """End this process and the workers at once; if a worker has ended, that is the reason."""
        with self._failing:
            until_s = time.monotonic() + _BLAME_S
            while not (ended := self._ended()) and time.monotonic() < until_s:
                time.sleep(0.01)
            logger.error("the target is incomplete, ending: %s", ended or reason)
            for process in self._processes:
                process.kill()
            shutil.rmtree(self._directory, ignore_errors=True)
            # What a worker could not be started with is a wrong setting of ours.
            codes = {process.wait() for process in self._processes}
            os._exit(CONFIGURATION_ERROR if CONFIGURATION_ERROR in codes else WORKER_LOST)

    def stop(self) -> None:
        """Tell the workers to end and wait for them."""
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
        """Which worker has ended, and how; empty when none has."""
        codes = {rank: process.poll() for rank, process in enumerate(self._processes, 1)}
        return ", ".join(f"rank {rank} ended with exit code {code}" for rank, code in codes.items() if code is not None)


class PassReader:
    """A worker's end of the socket, which remains the caller's to close."""

    def __init__(self, source: socket.socket) -> None:
        self._socket = source

    def next(self) -> bytearray | None:
        """The next message, however long it takes to come; None once rank 0 sends no more."""
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
