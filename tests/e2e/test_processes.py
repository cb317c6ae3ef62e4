"""The services as processes of one machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from coppice.cli.topology import DRAFTER_NICENESS, Topology
from verifier_svc.grammar.trial import NICENESS as GRAMMAR_NICENESS


def thread_ids(process_id: int) -> list[int]:
    return [int(path.name) for path in Path(f"/proc/{process_id}/task").iterdir()]


@pytest.mark.skipif(sys.platform != "linux", reason="threads are looked up in /proc")
async def test_the_drafter_steps_back_behind_the_others_with_every_thread(topology: Topology) -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    niceness: dict[str, set[int]] = {}
    for child in topology._children:
        assert child._process is not None
        threads = thread_ids(child._process.pid)
        niceness[child.name] = {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads}
    behind = min(19, own + int(DRAFTER_NICENESS))
    # The verifier's threads that compile grammars step back, too.
    assert niceness.pop("verifier") in ({own}, {own, min(19, own + GRAMMAR_NICENESS)})
    assert niceness == {"drafter small-lm": {behind}, "orchestrator": {own}}
