"""The thread that encodes long prompts: one at a time, in turns of hosts and their connections."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from coppice.net.turns import Turns

Result = TypeVar("Result")


class Encoder:
    """One thread: many long prompts leave the other cores to the rest."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="encode")
        self._turns: Turns[asyncio.Future[None]] = Turns()
        self._is_busy = False

    async def run(self, function: Callable[[], Result], host: str, connection: str) -> Result:
        """The result of a function, or its error, once it is the connection's turn."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._turns.add(turn, host, connection)
        self._go_on()
        try:
            await turn
        except asyncio.CancelledError:
            self._turns.remove(turn, host, connection)
            if not turn.cancelled():
                self._free()
            raise
        running = asyncio.get_running_loop().run_in_executor(self._thread, function)
        # Busy until the thread is done, even after the call has ended.
        running.add_done_callback(lambda _: self._free())
        return await asyncio.shield(running)

    def _free(self) -> None:
        self._is_busy = False
        self._go_on()

    def _go_on(self) -> None:
        if self._is_busy:
            return
        turn = self._turns.take(lambda host, connection: True)
        if turn is not None:
            self._is_busy = True
            turn.set_result(None)
