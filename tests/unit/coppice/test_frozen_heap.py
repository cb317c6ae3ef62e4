"""What a service has loaded is in no garbage collection while it serves."""

from __future__ import annotations

import gc
from collections import deque

from coppice.net import rpc


def test_what_was_there_before_a_service_runs_is_never_looked_at_again() -> None:
    loaded = [[number] for number in range(1000)]
    frozen: list[int] = []
    looked_at: list[bool] = []

    async def serve() -> None:
        frozen.append(gc.get_freeze_count())
        looked_at.append(any(one is loaded for one in gc.get_objects()))

    rpc.run(serve)
    assert frozen[0] > 1000
    assert looked_at == [False]
    # When a process ends, everything is taken down.
    assert any(one is loaded for one in gc.get_objects())


def test_garbage_does_not_pile_up_for_the_size_of_what_was_loaded() -> None:
    loaded = [[number] for number in range(800_000)]
    full: list[int] = []

    async def serve() -> None:
        before = num_full_collections()
        # Cycles that live long enough for only a full collection to find them.
        alive: deque[list[object]] = deque(maxlen=20_000)
        for _ in range(150_000):
            cycle: list[object] = []
            cycle.append(cycle)
            alive.append(cycle)
        full.append(num_full_collections() - before)

    rpc.run(serve)
    assert len(loaded) == 800_000
    assert full[0] >= 1


def num_full_collections() -> int:
    return int(gc.get_stats()[2]["collections"])
