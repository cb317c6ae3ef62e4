"""A drafter that behaves, without a model: what it proposes of the toy target's text is right or wrong as told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from coppice.core.tree import TokenTree, chain
from coppice.v1 import drafter_pb2, drafter_pb2_grpc, sampling_pb2
from coppice.wire.convert import tree_to_proto
from tests.toy_target import FINGERPRINT, VOCAB, Target, babble, plain

# (tokens so far, seed, max_nodes) -> tree
Propose = Callable[[Sequence[int], int, int], TokenTree]


def perfect(target: Target = babble, depth: int = 4) -> Propose:
    """Proposes what the target will say."""

    def propose(tokens: Sequence[int], seed: int, max_nodes: int) -> TokenTree:
        said = plain(target, tokens, min(depth, max_nodes), seed)
        return chain(said, [-0.1] * len(said))

    return propose


def wrong(target: Target = babble, after: int = 0, depth: int = 3) -> Propose:
    """Proposes what the target will say for `after` tokens, then what it will not."""

    def propose(tokens: Sequence[int], seed: int, max_nodes: int) -> TokenTree:
        said = plain(target, tokens, min(depth, max_nodes), seed)
        return chain([token if at < after else (token + 1) % 256 for at, token in enumerate(said)], [-0.5] * len(said))

    return propose


@dataclass
class FakeDrafter(drafter_pb2_grpc.DrafterServiceServicer):
    """Follows sequences and proposes trees, as slowly and as badly as it is told."""

    propose: Propose = field(default_factory=perfect)
    kind: str = "small-lm"
    tokenizer_fingerprint: str = FINGERPRINT
    delay_s: float = 0.0
    silent: bool = False
    # Drops the stream after this many trees, every time.
    dies_after: int | None = None
    # Answers the first outcome of a sequence with an error instead of a tree.
    gives_up: bool = False
    acceptance_rules: tuple[sampling_pb2.AcceptanceRule, ...] = ()
    acceptance_by_rank: tuple[float, ...] = ()
    shared_block_tokens: int = 0
    opened: list[drafter_pb2.OpenDraft] = field(default_factory=list)
    active: set[int] = field(default_factory=set)
    num_trees: int = 0
    errors: list[str] = field(default_factory=list)

    def forget(self) -> None:
        """Drop the records of calls, which grow with every one."""
        self.opened.clear()
        self.errors.clear()

    async def Describe(self, request: Any, context: Any) -> drafter_pb2.DrafterServiceDescribeResponse:  # noqa: N802
        return drafter_pb2.DrafterServiceDescribeResponse(
            kind=self.kind,
            model="toy-drafter",
            tokenizer_fingerprint=self.tokenizer_fingerprint,
            vocab_size=VOCAB,
            acceptance_rules=self.acceptance_rules,
            acceptance_by_rank=self.acceptance_by_rank,
            shared_block_tokens=self.shared_block_tokens,
        )

    async def Draft(self, requests: Any, context: Any) -> AsyncIterator[drafter_pb2.DraftResponse]:  # noqa: N802
        sequences: dict[int, tuple[list[int], int, int]] = {}
        num_trees = 0
        try:
            async for request in requests:
                number = request.sequence_id
                if request.HasField("close"):
                    sequences.pop(number, None)
                    self.active.discard(number)
                    continue
                self._take(sequences, request)
                if self.silent or number not in sequences:
                    continue
                await asyncio.sleep(self.delay_s)
                if self.gives_up and request.HasField("outcome"):
                    yield drafter_pb2.DraftResponse(
                        sequence_id=number, error=drafter_pb2.DraftError(code=8, message="too long")
                    )
                    continue
                if self.dies_after is not None and num_trees >= self.dies_after:
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "died")
                tokens, seed, max_nodes = sequences[number]
                num_trees += 1
                self.num_trees += 1
                tree = self.propose(tokens, seed, max_nodes)
                message = drafter_pb2.DraftTree(base_length=len(tokens), tree=tree_to_proto(tree))
                yield drafter_pb2.DraftResponse(sequence_id=number, tree=message)
        finally:
            self.active -= set(sequences)

    def _take(self, sequences: dict[int, tuple[list[int], int, int]], request: drafter_pb2.DraftRequest) -> None:
        number = request.sequence_id
        if request.HasField("open"):
            self.opened.append(request.open)
            self.active.add(number)
            sequences[number] = (
                list(request.open.prompt_token_ids),
                request.open.sampling.seed,
                request.open.max_nodes,
            )
        elif request.HasField("outcome") and number in sequences:
            tokens, _, _ = sequences[number]
            if request.outcome.base_length != len(tokens):
                self.errors.append(f"outcome for {request.outcome.base_length}, at {len(tokens)}")
            tokens.extend(request.outcome.token_ids)
