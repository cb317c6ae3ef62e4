"""The drafter as a process of its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from coppice.bundled import MODELS
from coppice.cli.child import Child


def thread_ids(process_id: int) -> list[int]:
    return [int(path.name) for path in Path(f"/proc/{process_id}/task").iterdir()]


@pytest.mark.skipif(sys.platform != "linux", reason="threads are looked up in /proc")
async def test_it_steps_back_behind_others_as_far_as_it_is_told() -> None:
    env = {"MODEL": str(MODELS / "small-lm"), "DEVICE": "cpu", "NICENESS": "3"}
    child = Child("drafter", "drafter_svc", env, echo=None)
    await child.start()
    try:
        await child.ready(60)
        assert child._process is not None
        threads = thread_ids(child._process.pid)
        own = os.getpriority(os.PRIO_PROCESS, 0)
        assert {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads} == {min(19, own + 3)}
    finally:
        await child.stop(10)
