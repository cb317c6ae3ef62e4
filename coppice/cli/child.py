"""One service as a child process: started, awaited until it is ready, watched, stopped."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from coppice.cli.errors import FAILED
from coppice.cli.tied_process import READY
from coppice.core.errors import CoppiceError

KEPT_LINES = 20
# Records, as `coppice.obs.logs` writes them as text.
_WARNING = re.compile(r"\S+ \S+ WARNING ")
_ERROR = re.compile(r"\S+ \S+ (?:ERROR|CRITICAL)(?: rank \d+)? \S+: (.*)")
# A log line longer than this is a dump, and is cut into pieces.
LINE_LIMIT = 1 << 20

Echo = Callable[[str], None]


class ChildError(CoppiceError):
    """A service did not start, or ended by itself; the message has its last words."""

    def __init__(self, message: str, exit_code: int = FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Child:
    """A service's process. Its stderr goes line by line to `echo`; the last lines are kept for errors.

    Unless `verbose`, nothing but warnings goes there before it is ready.
    """

    def __init__(
        self,
        name: str,
        module: str,
        env: Mapping[str, str],
        echo: Echo | None,
        arguments: Sequence[str] = (),
        *,
        verbose: bool = True,
        interpreter: str = sys.executable,
    ) -> None:
        self.name = name
        self.address = ""
        self.module = module
        self._env = dict(env)
        self._interpreter = interpreter
        self._arguments = tuple(arguments)
        self._echo = echo
        self._verbose = verbose
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._process: asyncio.subprocess.Process | None = None
        self._readers: list[asyncio.Task[None]] = []
        self._ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        """Start the process, without waiting for it to be ready."""
        self._process = await asyncio.create_subprocess_exec(
            self._interpreter,
            "-m",
            "coppice.cli.tied_process",
            str(os.getpid()),
            self.module,
            *self._arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **self._env},
            # Ctrl-C is for us; we stop the children in the right order.
            start_new_session=True,
            limit=LINE_LIMIT,
        )
        if self._process.stdout is None or self._process.stderr is None:
            raise ChildError(f"{self.name} was started without pipes")
        self._readers = [
            asyncio.create_task(self._read(self._process.stdout, self._on_output)),
            asyncio.create_task(self._read(self._process.stderr, self._on_log)),
        ]

    async def ready(self, timeout_s: float) -> str:
        """The address that it serves on. Raises ChildError if it ended first, or took longer than `timeout_s`."""
        ended = asyncio.create_task(self.ended())
        try:
            waits: set[asyncio.Future[Any]] = {self._ready, ended}
            await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
        if self._ready.done():
            self.address = self._ready.result()
            return self.address
        if ended.done() and not ended.cancelled():
            raise ended.result()
        raise ChildError(f"{self.name} was not ready within {timeout_s:g} s{self._last_word()}")

    async def ended(self) -> ChildError:
        """Wait until the process has ended; returns what there is to say about it."""
        if self._process is None:
            return ChildError(f"{self.name} was not started")
        code = await self._process.wait()
        await asyncio.gather(*self._readers, return_exceptions=True)
        if code < 0:
            return ChildError(f"{self.name} was ended by {signal.Signals(-code).name}{self._last_word()}")
        if self._ready.done() or not code:
            return ChildError(f"{self.name} ended with exit code {code}{self._last_word()}", code or FAILED)
        return ChildError(f"{self.name}{self._last_word() or f' ended with exit code {code}'}", code)

    async def stop(self, timeout_s: float) -> None:
        """Ask the process to stop, and kill it when it has not within `timeout_s`."""
        if self._process is None:
            return
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._process.wait()
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
                await self._process.wait()
        await asyncio.gather(*self._readers, return_exceptions=True)

    async def _read(self, stream: asyncio.StreamReader, handle: Callable[[str], None]) -> None:
        while True:
            try:
                line = await stream.readline()
            except ValueError:  # longer than the limit; the reader has dropped it
                continue
            if not line:
                return
            handle(line.decode(errors="replace").rstrip())

    def _on_output(self, line: str) -> None:
        if line.startswith(READY) and not self._ready.done():
            self._ready.set_result(line.removeprefix(READY).strip())
        else:
            self._on_log(line)

    def _on_log(self, line: str) -> None:
        self._lines.append(line)
        # Before it is ready, errors and tracebacks are of its end, which has a line of its own.
        if self._echo is not None and (self._verbose or self._ready.done() or _WARNING.match(line)):
            self._echo(f"[{self.name}] {line}")

    def _last_word(self) -> str:
        """The last error that it has logged, or else the last line."""
        said = [match[1] for line in self._lines if (match := _ERROR.match(line))] or list(self._lines)[-1:]
        return f": {said[-1].removeprefix(f'{self.name}: ')}" if said else ""
