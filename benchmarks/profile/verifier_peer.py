"""The other side of a verifier's stream: drafts are there before they are needed, so that no pass waits for one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import grpc

from benchmarks.contenders import BenchmarkError
from coppice.tree import TokenTree, chain
from coppice.v1 import sampling_pb2, verifier_pb2_grpc
from coppice.v1 import verifier_pb2 as pb
from coppice.wire import tree_to_proto

# A verifier keeps drafts for so many lengths that are not reached yet.
AHEAD = 8
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a pass: so many sequences, with so many draft nodes each, behind so many tokens.

    Drafts are all right, so that each round accepts them, or all wrong.
    """

    batch: int
    nodes: int
    context: int = 256
    right: bool = False

    @property
    def rows(self) -> int:
        """Of the pass."""
        return self.batch * (1 + self.nodes)

    @property
    def step(self) -> int:
        """Tokens that a round commits."""
        return 1 + self.nodes if self.right else 1


@dataclass(frozen=True, slots=True)
class PassSeen:
    """One pass: when its first outcome came, what the verifier says of it, and how many rounds of ours it held."""

    came_s: float
    rows: int
    pass_s: float
    num_rounds: int


@dataclass(frozen=True, slots=True)
class Known:
    """A prompt and its greedy output."""

    prompt: tuple[int, ...]
    said: tuple[int, ...]

    def draft(self, position: int, shape: Shape) -> TokenTree:
        """The draft for the round that starts behind so many tokens of the output."""
        tokens = self.said[position : position + shape.nodes]
        if not shape.right:
            tokens = (tokens[0] - 1 if tokens[0] else 1, *tokens[1:])
        return chain(tokens)


class VerifierPeer:
    """One stream to a verifier; sequence ids are counted through."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = verifier_pb2_grpc.VerifierServiceStub(channel)
        self._last_id = 0

    async def describe(self) -> pb.VerifierServiceDescribeResponse:
        """Model and limits."""
        description: pb.VerifierServiceDescribeResponse = await self._stub.Describe(
            pb.VerifierServiceDescribeRequest(), timeout=TIMEOUT_S
        )
        return description

    async def decode(
        self, prompt: Sequence[int], num_tokens: int, salt: str = "profile"
    ) -> tuple[Known, list[PassSeen]]:
        """Plain decoding, greedily and whatever is said."""
        stream = _Stream(self._stub)
        await stream.open(1, prompt, num_tokens, salt)
        passes = await stream.read(1)
        return Known(tuple(prompt), tuple(stream.tokens[1])), passes

    async def run(self, known: Known, shape: Shape, num_rounds: int) -> list[PassSeen]:
        """So many rounds of every sequence, and some more; passes without all sequences and drafts are left out."""
        stream = _Stream(self._stub)
        ids = range(1, shape.batch + 1)
        for sequence_id in ids:
            num_tokens = 1 + num_rounds * shape.step + shape.nodes
            await stream.open(sequence_id, known.prompt, num_tokens, "profile")
            if shape.nodes:
                stream.known[sequence_id] = (known, shape)
                for number in range(AHEAD):
                    await stream.draft(sequence_id, 1 + number * shape.step)
        passes = await stream.read(shape.batch)
        return [one for one in passes if (one.num_rounds, one.rows) == (shape.batch, _padded(one, shape))]


def _padded(one: PassSeen, shape: Shape) -> int:
    """The rows of a pass of that shape; the verifier may count rows that fill up a multiple."""
    return one.rows if shape.rows <= one.rows < shape.rows + 4 else -1


class _Stream:
    """One call, until all its sequences have ended."""

    def __init__(self, stub: verifier_pb2_grpc.VerifierServiceStub) -> None:
        self._call = stub.Verify(timeout=TIMEOUT_S)
        self.known: dict[int, tuple[Known, Shape]] = {}
        self.tokens: dict[int, list[int]] = {}

    async def open(self, sequence_id: int, prompt: Sequence[int], num_tokens: int, salt: str) -> None:
        stopping = sampling_pb2.StoppingOptions(max_tokens=num_tokens, ignore_eos=True)
        sampling = sampling_pb2.SamplingParams(temperature=0.0)
        message = pb.OpenSequence(prompt_token_ids=prompt, stopping=stopping, sampling=sampling, cache_salt=salt)
        self.tokens[sequence_id] = []
        await self._call.write(pb.VerifyRequest(sequence_id=sequence_id, open=message))

    async def draft(self, sequence_id: int, position: int) -> None:
        """Send the draft behind so many tokens of the output, as far as the output is known."""
        known, shape = self.known[sequence_id]
        if position + shape.nodes <= len(known.said):
            tree = known.draft(position, shape)
            draft = pb.Draft(base_length=len(known.prompt) + position, tree=tree_to_proto(tree))
            await self._call.write(pb.VerifyRequest(sequence_id=sequence_id, draft=draft))

    async def read(self, num_sequences: int) -> list[PassSeen]:
        """Every pass until all sequences have ended."""
        rounds: list[tuple[float, int, int]] = []
        left = num_sequences
        while left:
            response = await self._call.read()
            if response is grpc.aio.EOF:
                raise BenchmarkError("the verifier ended its stream")
            match response.WhichOneof("event"):
                case "outcome":
                    rounds.append((time.perf_counter(), response.outcome.pass_rows, response.outcome.pass_us))
                    await self._on_outcome(response.sequence_id, response.outcome)
                case "finished":
                    left -= 1
                case "error":
                    raise BenchmarkError(f"the verifier: {response.error.message}")
        self._call.cancel()
        return _passes(rounds)

    async def _on_outcome(self, sequence_id: int, outcome: pb.Outcome) -> None:
        self.tokens[sequence_id] += outcome.token_ids
        if sequence_id in self.known:
            step = self.known[sequence_id][1].step
            await self.draft(sequence_id, len(self.tokens[sequence_id]) + (AHEAD - 1) * step)


def _passes(rounds: Sequence[tuple[float, int, int]]) -> list[PassSeen]:
    """Rounds put together that say the same of their pass, one after another."""
    begins = [at for at in range(len(rounds)) if at == 0 or rounds[at][1:] != rounds[at - 1][1:]]
    return [
        PassSeen(rounds[first][0], rounds[first][1], rounds[first][2] / 1e6, end - first)
        for first, end in pairwise([*begins, len(rounds)])
    ]
