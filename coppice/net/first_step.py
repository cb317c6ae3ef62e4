"""Starting a coroutine within the caller's own turn of the event loop, as the eager tasks of Python 3.12 do."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Coroutine, Generator
from typing import Any


def start_now(coroutine: Coroutine[Any, None, None]) -> asyncio.Task[None] | None:
    """Run a coroutine up to its first wait at once, and the rest as a task; None when it has ended without a wait.

    What it raises before that wait reaches the caller.
    """
    try:
        awaited = coroutine.send(None)
    except StopIteration:
        return None
    return asyncio.create_task(_as_coroutine(coroutine, awaited))


async def _as_coroutine(coroutine: Coroutine[Any, None, None], awaited: Any) -> None:
    await _rest(coroutine, awaited)


@types.coroutine
def _rest(coroutine: Coroutine[Any, None, None], awaited: Any) -> Generator[Any, None, None]:
    """What comes after a coroutine's first step, which waits for `awaited`.

    A cancellation reaches it as any other; one before the task's own first turn closes it.
    """
    try:
        while True:
            try:
                yield awaited
            except BaseException as error:  # noqa: BLE001 - whatever the task throws is the coroutine's to handle
                awaited = coroutine.throw(error)
            else:
                awaited = coroutine.send(None)
    except StopIteration:
        return
