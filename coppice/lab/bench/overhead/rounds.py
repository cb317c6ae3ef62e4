"""The orchestrator's share of a round, measured between scripted peers in another process over loopback gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from typing import Any

from coppice.lab.bench.harness.experiment import BenchmarkError
from coppice.lab.bench.overhead.peers import RunSettings
from coppice.v1 import drafter_pb2, verifier_pb2
from orchestrator.app import running
from orchestrator.config import Config
from orchestrator.peers.drafter_client import DrafterClient
from orchestrator.peers.verifier_client import VerifierClient

LINE_LIMIT = 1 << 26
CONNECT_S = 20.0
# A run that takes longer than this hangs.
RUN_S = 600.0


class Probe:
    """Listens to one verifier's and one drafter's messages.

    A round's time is that from an outcome's arrival until the drafter's message has been written, and from the tree's
    arrival until the draft for the verifier has been. Everything between happens within these two calls.
    """

    def __init__(self, verifier: VerifierClient, drafter: DrafterClient) -> None:
        self.round_us: list[float] = []
        # When the message that is being handled came.
        self._came_s = 0.0
        # By the drafter's sequence: the first half of a round.
        self._first_half_s: dict[int, float] = {}
        # The drafter's sequence whose tree is being handled.
        self._tree_of: int | None = None
        _wrap(verifier, "on_message", before=self._on_outcome)
        _wrap(drafter, "on_message", before=self._on_tree)
        _wrap(drafter.stream, "send", after=self._told_drafter)
        _wrap(verifier.stream, "send", after=self._sent_draft)

    def _on_outcome(self, message: verifier_pb2.VerifyResponse) -> None:
        self._came_s, self._tree_of = time.perf_counter(), None

    def _told_drafter(self, message: drafter_pb2.DraftRequest) -> None:
        if message.HasField("outcome"):
            self._first_half_s[message.sequence_id] = time.perf_counter() - self._came_s

    def _on_tree(self, message: drafter_pb2.DraftResponse) -> None:
        self._came_s, self._tree_of = time.perf_counter(), message.sequence_id

    def _sent_draft(self, message: verifier_pb2.VerifyRequest) -> None:
        if self._tree_of is not None and message.HasField("draft"):
            first_s = self._first_half_s.pop(self._tree_of, None)
            if first_s is not None:
                self.round_us.append(1e6 * (first_s + time.perf_counter() - self._came_s))


def _nothing(message: Any) -> None: ...


def _wrap(
    owner: object, name: str, before: Callable[[Any], None] = _nothing, after: Callable[[Any], None] = _nothing
) -> None:
    inner: Callable[[Any], None] = getattr(owner, name)

    def outer(message: Any) -> None:
        before(message)
        inner(message)
        after(message)

    setattr(owner, name, outer)


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
    async with running(config) as orchestrator:
        probe = Probe(orchestrator.verifiers.clients[0], orchestrator.drafters.clients[0])
        warm_up = max(2, num_rounds // 5)
        settings = RunSettings(orchestrator.address, num_requests, num_rounds, warm_up, num_nodes, cache)
        await peers.tell(json.dumps(asdict(settings)))
        await peers.hear()
        probe.round_us.clear()
        started_s = time.process_time()
        await peers.tell("")
        seen = await peers.hear()
        spent_s = time.process_time() - started_s
    return {**seen, "inside_us": probe.round_us, "cpu_us": 1e6 * spent_s / seen["num_rounds"]}
