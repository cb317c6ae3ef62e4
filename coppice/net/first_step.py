"""Eager start of coroutines, like eager tasks in Python 3.12."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Coroutine, Generator
from typing import Any


def start_now(coroutine: Coroutine[Any, None, None]) -> asyncio.Task[None] | None:
    """Run a coroutine to its first wait at once, and the rest as a task; None if it never waits.

    Exceptions before that wait propagate to the caller.
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
    """The rest of a coroutine after its first step, which waits for `awaited`.

    Cancellation works as usual; before the task's first step it closes the coroutine.
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
