"""What the orchestrator adds to a round: measured between scripted peers in another process, over loopback gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass
from typing import Any

from coppice.lab.bench.harness.experiment import BenchmarkError
from coppice.lab.bench.overhead.peers import RunSettings
from coppice.v1 import drafter_pb2, verifier_pb2
from orchestrator.app import running
from orchestrator.config import Config
from orchestrator.peers.drafter_client import DrafterClient
from orchestrator.peers.verifier_client import VerifierClient


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

    def reset(self) -> None:
        """Begin anew."""
        self.round_us.clear()

    def _on_outcome(self, message: verifier_pb2.VerifyResponse) -> None:
        self._came_s, self._tree_of = time.perf_counter(), None

    def _told_drafter(self, message: drafter_pb2.DraftRequest) -> None:
        if message.HasField("outcome"):
            self._first_half_s[message.sequence_id] = time.perf_counter() - self._came_s

    def _on_tree(self, message: drafter_pb2.DraftResponse) -> None:
        self._came_s, self._tree_of = time.perf_counter(), message.sequence_id

    def _sent_draft(self, message: verifier_pb2.VerifyRequest) -> None:
        if self._tree_of is None or not message.HasField("draft"):
            return
        first_s = self._first_half_s.pop(self._tree_of, None)
        if first_s is not None:
            self.round_us.append(1e6 * (first_s + time.perf_counter() - self._came_s))


def _wrap(
    owner: object, name: str, before: Callable[[Any], None] | None = None, after: Callable[[Any], None] | None = None
) -> None:
    inner: Callable[[Any], None] = getattr(owner, name)

    def outer(message: Any) -> None:
        if before is not None:
            before(message)
        inner(message)
        if after is not None:
            after(message)

    setattr(owner, name, outer)


LINE_LIMIT = 1 << 26
CONNECT_S = 20.0
# A run that takes longer than this hangs.
RUN_S = 600.0


@dataclass(frozen=True, slots=True)
class RoundCosts:
    """Rounds of one run: microseconds inside the orchestrator and seen by its peers, and its CPU time for each.

    `messages`, `num_bytes` (in all) and `largest` (bytes of a message) are by direction.
    """

    num_rounds: int
    inside_us: tuple[float, ...]
    outside_us: tuple[float, ...]
    cpu_us_per_round: float
    messages: dict[str, int]
    num_bytes: dict[str, int]
    largest: dict[str, int]


class Peers:
    """The process of the scripted peers."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.verifier = self.drafter = ""

    async def start(self) -> None:
        """Wait until they listen."""
        addresses = await self.hear()
        self.verifier, self.drafter = addresses["verifier"], addresses["drafter"]

    async def tell(self, text: str) -> None:
        """Send a line."""
        assert self._process.stdin is not None, "it was made with pipes"
        self._process.stdin.write(text.encode() + b"\n")
        await self._process.stdin.drain()

    async def hear(self) -> dict[str, Any]:
        """The next line.

        Raises:
            BenchmarkError: the process has ended, or says nothing.
        """
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
async def scripted_peers() -> AsyncIterator[Peers]:
    """The peers' process, while the context is open. Start it before this process uses gRPC, which forbids forks."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "coppice.lab.bench.overhead.peers",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=LINE_LIMIT,
    )
    try:
        peers = Peers(process)
        await peers.start()
        yield peers
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def measure_rounds(
    peers: Peers, num_requests: int, num_rounds: int, warm_up_rounds: int, num_nodes: int, cache: bool
) -> RoundCosts:
    """One run: so many requests at once, each of about so many rounds with trees of `num_nodes` nodes.

    With `cache` the text is one that the prefix cache knows, so that its tree is merged into every draft.
    """
    config = Config(
        verifier_address=peers.verifier,
        drafter_addresses=(peers.drafter,),
        require_drafters=True,
        max_nodes=num_nodes,
        cache_drafter=cache,
        connect_timeout_s=CONNECT_S,
        grace_s=0.0,
    )
    async with running(config) as orchestrator:
        probe = Probe(orchestrator.verifiers.clients[0], orchestrator.drafters.clients[0])
        settings = RunSettings(orchestrator.address, num_requests, num_rounds, warm_up_rounds, num_nodes, cache)
        await peers.tell(json.dumps(asdict(settings)))
        await peers.hear()
        probe.reset()
        started_s = time.process_time()
        await peers.tell("")
        seen = await peers.hear()
        spent_s = time.process_time() - started_s
    rounds = seen["num_rounds"]
    return RoundCosts(
        num_rounds=rounds,
        inside_us=tuple(probe.round_us),
        outside_us=tuple(seen["round_us"]),
        cpu_us_per_round=1e6 * spent_s / rounds,
        messages=seen["messages"],
        num_bytes=seen["bytes"],
        largest=seen["largest"],
    )
