"""The orchestrator's share of a round, measured between scripted peers in another process over loopback gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import time
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from coppice.lab.bench.harness.experiment import BenchmarkError
from coppice.lab.bench.overhead.peers import RunSettings, run_peers
from coppice.obs.timeline import Timeline, TimelineEvent
from orchestrator.app import running
from orchestrator.config import Config

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


@contextlib.contextmanager
def scripted_peers() -> Iterator[Connection]:
    """A connection to the peers' process, which runs while the context is open. The process first tells addresses."""
    # A fork would break gRPC in both processes.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=run_peers, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        process.kill()
        process.join()


async def heard(peers: Connection) -> Any:
    """What the peers say next. Raises BenchmarkError if their process has ended, or says nothing."""
    if not await asyncio.to_thread(peers.poll, RUN_S):
        raise BenchmarkError(f"the scripted peers have said nothing for {RUN_S:g} s")
    try:
        return peers.recv()
    except EOFError as error:
        raise BenchmarkError("the scripted peers have ended") from error


async def measure_rounds(
    peers: Connection, addresses: dict[str, str], num_requests: int, num_rounds: int, num_nodes: int, cache: bool
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
        peers.send(settings)
        await heard(peers)
        began_us, started_s = 1e6 * time.monotonic(), time.process_time()
        peers.send("go on")
        seen = await heard(peers)
        spent_s = time.process_time() - started_s
    events = [event for event in timeline.events() if event.at_us >= began_us]
    return {**seen, "inside_us": inside_us(events), "cpu_us": 1e6 * spent_s / seen["num_rounds"]}
