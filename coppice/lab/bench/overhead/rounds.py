"""The orchestrator's share of a round, measured between scripted peers in another process over loopback gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from coppice.lab.bench.harness.experiment import BenchmarkError
from coppice.lab.bench.overhead.peers import RunSettings
from coppice.obs.timeline import Timeline, TimelineEvent
from orchestrator.app import running
from orchestrator.config import Config

LINE_LIMIT = 1 << 26
CONNECT_S = 20.0
# A run that takes longer than this hangs.
RUN_S = 600.0


def inside_us(events: Iterable[TimelineEvent]) -> list[float]:
    """Microseconds of each round that had a draft, from an orchestrator's timeline.

    A round's time is that from an outcome's arrival until the drafter's message has been written, and from the tree's
    arrival until the draft for the verifier has been. Each half is the handling of one message.
    """
    found: list[float] = []
    # By the drafter's sequence: the first half of a round.
    first_half_us: dict[int, float] = {}
    came_us, tree_of = 0.0, -1
    for event in events:
        match event.what:
            case "verifier.outcome.in":
                came_us, tree_of = event.at_us, -1
            case "drafter.outcome.out":
                first_half_us[event.sequence] = event.at_us - came_us
            case "drafter.tree.in":
                came_us, tree_of = event.at_us, event.sequence
            case "verifier.draft.out" if tree_of in first_half_us:
                found.append(first_half_us.pop(tree_of) + event.at_us - came_us)
    return found


class Peers:
    """The process of the scripted peers."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def tell(self, text: str) -> None:
        assert self._process.stdin is not None, "it was made with pipes"
        self._process.stdin.write(text.encode() + b"\n")
        await self._process.stdin.drain()

    async def hear(self) -> dict[str, Any]:
        """The next line. Raises BenchmarkError if the process has ended, or says nothing."""
        assert self._process.stdout is not None, "it was made with pipes"
        try:
            async with asyncio.timeout(RUN_S):
                line = await self._process.stdout.readline()
        except TimeoutError as error:
            raise BenchmarkError(f"the scripted peers have said nothing for {RUN_S:g} s") from error
        if not line:
            raise BenchmarkError("the scripted peers have ended")
        heard: dict[str, Any] = json.loads(line)
        return heard


@contextlib.asynccontextmanager
async def scripted_peers() -> AsyncIterator[tuple[Peers, dict[str, str]]]:
    """The peers' process, while the context is open, and their addresses.

    Start it before this process uses gRPC, which forbids forks.
    """
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, "-m", "coppice.lab.bench.overhead.peers")
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=LINE_LIMIT)
    try:
        peers = Peers(process)
        yield peers, await peers.hear()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def measure_rounds(
    peers: Peers, addresses: dict[str, str], num_requests: int, num_rounds: int, num_nodes: int, cache: bool
) -> dict[str, Any]:
    """One run, as the peers saw it: so many requests at once, each of about so many rounds with such trees.

    Also `inside_us` of each round, and `cpu_us`, the orchestrator's CPU time for one. With `cache` the text is one that
    the prefix cache knows, so that its tree is merged into every draft.
    """
    config = Config(
        verifier_address=addresses["verifier"],
        drafter_addresses=(addresses["drafter"],),
        require_drafters=True,
        max_nodes=num_nodes,
        cache_drafter=cache,
        connect_timeout_s=CONNECT_S,
        grace_s=0.0,
    )
    timeline = Timeline(Path("unused"))
    async with running(config, timeline=timeline) as orchestrator:
        warm_up = max(2, num_rounds // 5)
        settings = RunSettings(orchestrator.address, num_requests, num_rounds, warm_up, num_nodes, cache)
        await peers.tell(json.dumps(asdict(settings)))
        await peers.hear()
        began_us, started_s = 1e6 * time.monotonic(), time.process_time()
        await peers.tell("")
        seen = await peers.hear()
        spent_s = time.process_time() - started_s
    events = [event for event in timeline.events() if event.at_us >= began_us]
    return {**seen, "inside_us": inside_us(events), "cpu_us": 1e6 * spent_s / seen["num_rounds"]}
