"""Grammars whose cost nobody can tell from their text are compiled in a process of their own first.

llguidance's own limits do not bound the time of every grammar: the intersection of thirty patterns takes minutes. A
thread cannot be stopped, a process can. It is started with the first grammar that needs it, runs at low priority, ends
when this process does, and is started anew after a grammar that was too much for it.
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

# CPU time of a trial, and memory that it may take beside what the process has. Large schemas of an ordinary kind take
# up to 0.2 s and 30 MiB.
TRIAL_CPU_S = 0.5
TRIAL_BYTES = 128 << 20
# Memory that a compiled grammar may take. Ordinary ones of 64 KiB take up to 6 MiB.
MAX_COMPILED_BYTES = 16 << 20
# Time of a trial on the clock: reached only where the machine gives the process hardly any CPU time.
TRIAL_S = 20.0
# Time until the process has read the target's vocabulary, on a busy machine.
_START_S = 60.0
NICENESS = 10
_LENGTH_BYTES = 4


def write_frame(sink: IO[bytes], frame: dict[str, Any]) -> None:
    """Send a frame.

    Raises:
        OSError: nobody reads.
    """
    body = json.dumps(frame).encode()
    sink.write(len(body).to_bytes(_LENGTH_BYTES, "little") + body)
    sink.flush()


def read_frame(source: IO[bytes]) -> dict[str, Any] | None:
    """The next frame, however long it takes to come; None once there are no more."""
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
    """The process that tries grammars. Used by one thread at a time, but for `stop`."""

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
        """Compile a grammar over there; returns the bytes that it takes.

        Raises:
            InvalidRequestError: it cannot be compiled, or takes too much time or memory.
            OverloadedError: the machine has no time for it now.
            CoppiceError: the process cannot be started.
        """
        process = self._running()
        try:
            frame = self._ask(process, {"kind": grammar.kind.value, "text": grammar.text}, TRIAL_S)
        except OSError:
            frame = None
        if frame is None:
            code = self._end(process)
            # Its own timer's signal, or an allocation that failed.
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
        """End the process, and start no other; a trial that runs fails."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._process.kill()

    def close(self) -> None:
        """End the process and free what belongs to it; no trial may be running."""
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
                # Memory that threads reserve would count against its limit.
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
        """The answer to a frame; None where none came in time, or the process ended."""
        assert process.stdin is not None, "it is a pipe"
        assert process.stdout is not None, "it is a pipe"
        write_frame(process.stdin, frame)
        readable, _, _ = select.select([process.stdout], [], [], timeout_s)
        return read_frame(process.stdout) if readable else None

    def _end(self, process: subprocess.Popen[bytes]) -> int:
        """Clear a process away; returns its exit code, that of a kill where it had not ended."""
        try:
            # It closes its end of the pipe before it can be waited for.
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
