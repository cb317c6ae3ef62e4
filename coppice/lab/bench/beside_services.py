"""A measurement beside services: without one of them it would mean nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from coppice.cli.child import Child, ChildError
from coppice.cli.topology import Topology

Result = TypeVar("Result")


async def unless_one_fails(
    topology: Topology, measuring: Coroutine[Any, Any, Result], children: Sequence[Child] = ()
) -> Result:
    """What is measured, unless a service of the topology, or one of `children`, ends before.

    Raises:
        ChildError: of the first that ended.
    """
    measured = asyncio.create_task(measuring)
    failed: list[asyncio.Task[ChildError]] = [asyncio.create_task(topology.failed())]
    failed += [asyncio.create_task(child.ended()) for child in children]
    try:
        await asyncio.wait([measured, *failed], return_when=asyncio.FIRST_COMPLETED)
        for wait in failed:
            if wait.done():
                raise wait.result()
        return measured.result()
    finally:
        # One that measures in a thread ends with its first call to a server that is gone.
        for task in (measured, *failed):
            task.cancel()
        await asyncio.gather(measured, *failed, return_exceptions=True)
