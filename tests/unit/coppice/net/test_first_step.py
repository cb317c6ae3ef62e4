"""A coroutine that is started at once behaves as a task does from its first wait on."""

from __future__ import annotations

import asyncio

from coppice.net.first_step import start_now


async def test_a_started_coroutine_is_cancelled_and_waits_again_as_a_task_does() -> None:
    seen: list[str] = []

    async def one() -> None:
        seen.append("started")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.append("cancelled")
        await asyncio.sleep(0)
        seen.append("ended")

    task = start_now(one())
    assert task is not None
    assert seen == ["started"]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait_for(task, 5)
    assert seen == ["started", "cancelled", "ended"]


async def test_a_coroutine_that_never_waits_needs_no_task() -> None:
    async def one() -> None: ...

    assert start_now(one()) is None
