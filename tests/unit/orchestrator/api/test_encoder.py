"""The thread of long prompts: hosts take turns, and what ends while it waits or runs holds up nobody."""

from __future__ import annotations

import asyncio
import threading

from orchestrator.api.encoder import Encoder


async def test_a_prompt_waits_for_one_of_another_host_not_for_all() -> None:
    encoder, order = Encoder(), list[str]()
    hold = threading.Event()

    def encoding(name: str) -> list[int]:
        hold.wait(10)
        order.append(name)
        return []

    async def run(name: str, host: str) -> None:
        await encoder.run(lambda: encoding(name), host, host)

    many = [asyncio.create_task(run(f"many {number}", "many")) for number in range(8)]
    await asyncio.sleep(0)
    one = asyncio.create_task(run("one", "other"))
    await asyncio.sleep(0)
    hold.set()
    async with asyncio.timeout(10):
        await asyncio.gather(one, *many)
    # The second came before, and had a turn of its own.
    assert order[:4] == ["many 0", "many 1", "one", "many 2"]
    assert len(order) == 9


async def test_what_is_cancelled_gives_its_turn_to_the_next() -> None:
    encoder, hold, begun = Encoder(), threading.Event(), threading.Event()

    def encoding() -> list[int]:
        begun.set()
        hold.wait(10)
        raise ValueError

    running = asyncio.create_task(encoder.run(encoding, "a", "a"))
    await asyncio.to_thread(begun.wait, 10)
    waiting = asyncio.create_task(encoder.run(list[int], "a", "a"))
    last = asyncio.create_task(encoder.run(lambda: [7], "a", "a"))
    await asyncio.sleep(0)
    for task in (waiting, running):
        task.cancel()
    await asyncio.sleep(0.02)
    # The thread still works for the first.
    assert not last.done()
    hold.set()
    async with asyncio.timeout(10):
        assert await last == [7]
