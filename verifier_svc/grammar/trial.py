"""Trial of grammars with unknown cost: compilation in another process first.

llguidance's limits do not bound the time of every grammar: the intersection of thirty patterns takes minutes. A thread
cannot be stopped, a process can. It is started with the first grammar that needs it, runs at low priority, ends with
this process, and is restarted after a grammar that exceeded its limits.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import IO, Any

from coppice.core.errors import CoppiceError, InvalidRequestError, OverloadedError
from coppice.core.grammar import Grammar

logger = logging.getLogger(__name__)

# CPU time of a trial, and memory in addition to the process's own. Ordinary large schemas take up to 0.2 s and 30 MiB.
TRIAL_CPU_S = 0.5
TRIAL_BYTES = 128 << 20
# Memory of a compiled grammar. Ordinary ones of 64 KiB of text take up to 6 MiB.
MAX_COMPILED_BYTES = 16 << 20
# Wall-clock time of a trial: reached only if the process gets hardly any CPU time.
TRIAL_S = 20.0
# Time for reading the target's vocabulary on a busy machine.
_START_S = 60.0
NICENESS = 10
_LENGTH_BYTES = 4


def write_frame(sink: IO[bytes], frame: dict[str, Any]) -> None:
    """Send a frame.

    Raises:
        OSError: the other end is closed.
    """
    body = json.dumps(frame).encode()
    sink.write(len(body).to_bytes(_LENGTH_BYTES, "little") + body)
    sink.flush()


def read_frame(source: IO[bytes]) -> dict[str, Any] | None:
    """Wait for the next frame; None at the end of the stream."""
    length = source.read(_LENGTH_BYTES)
    if len(length) < _LENGTH_BYTES:
        return None
    size = int.from_bytes(length, "little")
    body = source.read(size)
    if len(body) < size:
        return None
    frame: dict[str, Any] = json.loads(body)
    return frame


class GrammarTrial:
    """Process for trials. Used by one thread at a time, except `stop`."""

    def __init__(self, tokenizer_json: bytes, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._target = {
            "tokenizer": tokenizer_json.decode(),
            "vocab_size": vocab_size,
            "eos_token_ids": list(eos_token_ids),
        }
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def measure(self, grammar: Grammar) -> int:
        """Compile a grammar in the other process; returns its size in bytes.

        Raises:
            InvalidRequestError: it cannot be compiled, or takes too much time or memory.
            OverloadedError: the process got too little CPU time.
            CoppiceError: the process cannot be started.
        """
        process = self._running()
        try:
            frame = self._ask(process, {"kind": grammar.kind.value, "text": grammar.text}, TRIAL_S)
        except OSError:
            frame = None
        if frame is None:
            code = self._end(process)
            # CPU timer, or a failed allocation.
            if code in (-signal.SIGPROF, -signal.SIGABRT, -signal.SIGSEGV, 1):
                raise InvalidRequestError(grammar.field, "is too complex: it takes too long, or too much memory")
            raise OverloadedError("no time to compile the grammar")
        if "refusal" in frame:
            raise InvalidRequestError(frame["field"], frame["refusal"])
        size = int(frame["bytes"])
        if size > MAX_COMPILED_BYTES:
            raise InvalidRequestError(grammar.field, "is too complex: it takes too much memory")
        return size

    def stop(self) -> None:
        """End the process for good; a running trial fails."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._process.kill()

    def close(self) -> None:
        """End the process and free its resources; no trial may be running."""
        self.stop()
        if self._process is not None:
            self._end(self._process)

    def _running(self) -> subprocess.Popen[bytes]:
        process = self._process
        if process is not None and process.poll() is None:
            return process
        if process is not None:
            self._end(process)
        with self._lock:
            if self._closed:
                raise CoppiceError("the verifier is stopping")
            process = self._process = subprocess.Popen(
                [sys.executable, "-m", "verifier_svc.grammar.trial_worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                # Memory reserved by threads would count against its limit.
                env={**os.environ, "MALLOC_ARENA_MAX": "1", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            )
        try:
            started = self._ask(process, self._target, _START_S) is not None
        except OSError:
            started = False
        if not started:
            code = self._end(process)
            logger.error("the process that tries grammars did not start: exit code %s", code)
            raise CoppiceError("the grammar could not be compiled")
        return process

    def _ask(self, process: subprocess.Popen[bytes], frame: dict[str, Any], timeout_s: float) -> dict[str, Any] | None:
        """Reply to a frame; None after the timeout or if the process ended."""
        assert process.stdin is not None, "it is a pipe"
        assert process.stdout is not None, "it is a pipe"
        write_frame(process.stdin, frame)
        readable, _, _ = select.select([process.stdout], [], [], timeout_s)
        return read_frame(process.stdout) if readable else None

    def _end(self, process: subprocess.Popen[bytes]) -> int:
        """Clean up a process, killing it if it still runs; returns its exit code."""
        try:
            # Its end of the pipe closes before it exits.
            process.wait(0.2)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        with self._lock:
            if self._process is process:
                self._process = None
        return process.returncode
