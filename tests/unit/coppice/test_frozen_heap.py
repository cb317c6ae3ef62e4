"""What a service has loaded is in no garbage collection while it serves."""

from __future__ import annotations

import gc

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
