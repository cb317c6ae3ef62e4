"""A verifier and a drafter that answer at once, as a script says, and what they count of an orchestrator's messages.

All the time that passes is the orchestrator's.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import Message

from coppice.core.tree import ROOT, TokenTree
from coppice.lab.bench.overhead.draft_trees import ScriptedText
from coppice.v1 import drafter_pb2, drafter_pb2_grpc, sampling_pb2, verifier_pb2, verifier_pb2_grpc
from coppice.version import VERSION
from coppice.wire.convert import tree_from_proto, tree_to_proto


@dataclass
class Traffic:
    """Messages and bytes by direction, and how long the orchestrator took with each round that had a draft.

    A round's time is that from the outcome's leaving the verifier to its coming to the drafter, and from the draft's
    leaving the drafter to its coming to the verifier: both ways through the network and two services' libraries.
    """

    messages: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    num_bytes: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    largest: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    num_rounds: int = 0
    round_us: list[float] = field(default_factory=list)
    # By request and committed length: what of a round has been seen.
    _outcome_left_s: dict[tuple[int, int], float] = field(default_factory=dict)
    _to_drafter_s: dict[tuple[int, int], float] = field(default_factory=dict)
    _draft_left_s: dict[tuple[int, int], float] = field(default_factory=dict)

    def reset(self) -> None:
        """Begin anew."""
        fresh = Traffic()
        for name in vars(fresh):
            setattr(self, name, getattr(fresh, name))

    def report(self) -> dict[str, Any]:
        """What was counted and timed, as JSON takes it."""
        return {
            "num_rounds": self.num_rounds,
            "round_us": self.round_us,
            "messages": dict(self.messages),
            "bytes": dict(self.num_bytes),
            "largest": dict(self.largest),
        }

    def count(self, way: str, message: Message) -> None:
        """A message of a round went this way."""
        size = message.ByteSize()
        self.messages[way] += 1
        self.num_bytes[way] += size
        self.largest[way] = max(self.largest[way], size)

    def outcome_leaves(self, request: int, length: int) -> None:
        """The verifier sends an outcome after which so many tokens are committed."""
        self.num_rounds += 1
        self._outcome_left_s[request, length] = time.perf_counter()

    def outcome_comes(self, request: int, length: int) -> None:
        """The drafter has it."""
        now_s = time.perf_counter()
        left_s = self._outcome_left_s.pop((request, length), None)
        if left_s is not None:
            self._to_drafter_s[request, length] = now_s - left_s

    def draft_leaves(self, request: int, length: int) -> None:
        """The drafter sends a draft behind so many tokens."""
        self._draft_left_s[request, length] = time.perf_counter()

    def draft_comes(self, request: int, length: int) -> None:
        """The verifier has it."""
        now_s = time.perf_counter()
        left_s = self._draft_left_s.pop((request, length), None)
        there_s = self._to_drafter_s.pop((request, length), None)
        if left_s is not None and there_s is not None:
            self.round_us.append(1e6 * (there_s + now_s - left_s))


KIND = "scripted"
# What outcomes say of their pass, though it took no time. All of them say the same, so that the planner takes one round
# of each request for a pass, as it is where a verifier's passes take as long as they say.
PASS_US = 20_000
PASS_ROWS = 1024
# A round that waits for a draft which does not come goes on without it.
PATIENCE_S = 5.0
# Outcomes that are drafted for, where the drafter drafts ahead.
AHEAD_TREES = 16
MAX_CONTEXT_TOKENS = 1 << 20
# The four ways of a round's messages.
OUTCOME_IN, OUTCOME_ON, DRAFT_IN, DRAFT_ON = (
    "verifier to orchestrator",
    "orchestrator to drafter",
    "drafter to orchestrator",
    "orchestrator to verifier",
)


@dataclass
class Script:
    """What both peers have in common."""

    tokenizer_json: bytes
    tokenizer_fingerprint: str
    vocab_size: int
    num_nodes: int
    repeats: bool
    traffic: Traffic
    drafts_ahead: bool = False

    def text(self, seed: int) -> ScriptedText:
        """The text of the request with this seed, which names it to both peers."""
        return ScriptedText(seed, self.vocab_size, self.num_nodes, self.repeats)


class ScriptedVerifier(verifier_pb2_grpc.VerifierServiceServicer):
    """Commits the script's text, and of a draft what agrees with it, as soon as the draft is there."""

    def __init__(self, script: Script) -> None:
        self._script = script

    async def Describe(self, request: Any, context: Any) -> verifier_pb2.VerifierServiceDescribeResponse:  # noqa: N802
        """A target that nobody has."""
        return verifier_pb2.VerifierServiceDescribeResponse(
            model=KIND,
            tokenizer_fingerprint=self._script.tokenizer_fingerprint,
            vocab_size=self._script.vocab_size,
            max_context_tokens=MAX_CONTEXT_TOKENS,
            max_nodes=1024,
            exactness=sampling_pb2.EXACTNESS_STRICT,
            version=VERSION,
        )

    async def GetTokenizer(self, request: Any, context: Any) -> verifier_pb2.GetTokenizerResponse:  # noqa: N802
        """The tokenizer that prompts of the public API are for."""
        return verifier_pb2.GetTokenizerResponse(
            tokenizer_json=self._script.tokenizer_json, tokenizer_fingerprint=self._script.tokenizer_fingerprint
        )

    async def Verify(self, requests: Any, context: Any) -> AsyncIterator[verifier_pb2.VerifyResponse]:  # noqa: N802
        """Run every sequence of one stream."""
        responses: asyncio.Queue[verifier_pb2.VerifyResponse] = asyncio.Queue()
        reader = asyncio.create_task(self._read(requests, responses))
        try:
            while True:
                yield await responses.get()
        finally:
            reader.cancel()

    async def _read(self, requests: Any, responses: asyncio.Queue[verifier_pb2.VerifyResponse]) -> None:
        sequences: dict[int, _Sequence] = {}
        async for request in requests:
            number = request.sequence_id
            match request.WhichOneof("event"):
                case "open":
                    seed = request.open.sampling.seed
                    sequence = _Sequence(number, request.open, self._script.text(seed), self._script.traffic, responses)
                    sequences[number] = sequence
                    # A prompt's round waits for nobody.
                    sequence.run(None)
                case "draft" if number in sequences:
                    self._script.traffic.count(DRAFT_ON, request)
                    sequences[number].on_draft(request.draft)
                case "close":
                    sequences.pop(number, None)


class _Sequence:
    def __init__(
        self,
        number: int,
        opening: verifier_pb2.OpenSequence,
        text: ScriptedText,
        traffic: Traffic,
        responses: asyncio.Queue[verifier_pb2.VerifyResponse],
    ) -> None:
        self._number = number
        self._seed = opening.sampling.seed
        self._length = len(opening.prompt_token_ids)
        self._end = self._length + opening.stopping.max_tokens
        self._lingers = opening.linger_us > 0
        self._text = text
        self._traffic = traffic
        self._responses = responses
        self._timer: asyncio.TimerHandle | None = None

    def on_draft(self, draft: verifier_pb2.Draft) -> None:
        if draft.HasField("linger_us"):
            self._lingers = draft.linger_us > 0
        if draft.base_length != self._length or self._timer is None:
            return
        if draft.tree.token_ids:
            self._traffic.draft_comes(self._seed, self._length)
            self.run(tree_from_proto(draft.tree))
        else:
            # An empty tree means that none will come.
            self.run(None)

    def run(self, tree: TokenTree | None) -> None:
        """One round, and at once the next where none waits for a draft."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        outcome = self._outcome(tree)
        self._length += len(outcome.token_ids)
        response = verifier_pb2.VerifyResponse(sequence_id=self._number, outcome=outcome)
        self._traffic.count(OUTCOME_IN, response)
        self._traffic.outcome_leaves(self._seed, self._length)
        self._responses.put_nowait(response)
        if self._length >= self._end:
            finished = verifier_pb2.SequenceFinished(reason=sampling_pb2.FINISH_REASON_LENGTH)
            self._responses.put_nowait(verifier_pb2.VerifyResponse(sequence_id=self._number, finished=finished))
            return
        delay_s = PATIENCE_S if self._lingers else PASS_US / 1e6
        self._timer = asyncio.get_running_loop().call_later(delay_s, self.run, None)

    def _outcome(self, tree: TokenTree | None) -> verifier_pb2.Outcome:
        accepted: list[int] = []
        token_ids = [self._text.token(self._length)]
        room = self._end - self._length
        node = ROOT
        while tree is not None and len(token_ids) < room:
            child = tree.children.get((node, token_ids[-1]))
            if child is None:
                break
            accepted.append(child)
            token_ids.append(self._text.token(self._length + len(token_ids)))
            node = child
        num_nodes = 0 if tree is None else len(tree)
        return verifier_pb2.Outcome(
            base_length=self._length,
            token_ids=token_ids,
            accepted_nodes=accepted,
            draft_nodes=num_nodes,
            draft_depth=0 if tree is None else tree.depth,
            pass_rows=PASS_ROWS,
            pass_us=PASS_US,
        )


class ScriptedDrafter(drafter_pb2_grpc.DrafterServiceServicer):
    """Answers every outcome at once with the script's tree."""

    def __init__(self, script: Script) -> None:
        self._script = script

    def _ahead(
        self, request: drafter_pb2.DraftRequest, sequences: dict[int, tuple[int, ScriptedText, int]]
    ) -> drafter_pb2.DraftResponse | None:
        """Trees of `num_nodes` nodes in all, behind the outcome of each path of the expected tree."""
        if request.sequence_id not in sequences:
            return None
        _, text, length = sequences[request.sequence_id]
        expected = tree_from_proto(request.expect.tree)
        response = drafter_pb2.DraftResponse(sequence_id=request.sequence_id)
        behind = text.draft(length).first(self._script.num_nodes // AHEAD_TREES)
        for path in sorted(expected.paths(), key=len)[-AHEAD_TREES:]:
            assumed = (*path, (path[-1] + 1) % self._script.vocab_size)
            response.ahead.trees.add(
                base_length=length, tree=tree_to_proto(behind), assumed_token_ids=assumed, outcome_log_prob=-1.0
            )
        return response

    async def Describe(self, request: Any, context: Any) -> drafter_pb2.DrafterServiceDescribeResponse:  # noqa: N802
        """A drafter for the scripted target."""
        return drafter_pb2.DrafterServiceDescribeResponse(
            kind=KIND,
            model=KIND,
            tokenizer_fingerprint=self._script.tokenizer_fingerprint,
            vocab_size=self._script.vocab_size,
            drafts_ahead=self._script.drafts_ahead,
        )

    async def Draft(self, requests: Any, context: Any) -> AsyncIterator[drafter_pb2.DraftResponse]:  # noqa: N802
        """Follow every sequence of one stream."""
        traffic = self._script.traffic
        # Seed, text and committed length.
        sequences: dict[int, tuple[int, ScriptedText, int]] = {}
        async for request in requests:
            number = request.sequence_id
            if request.HasField("expect"):
                traffic.count(OUTCOME_ON, request)
                if (response := self._ahead(request, sequences)) is not None:
                    traffic.count(DRAFT_IN, response)
                    yield response
                continue
            if request.HasField("open"):
                seed = request.open.sampling.seed
                sequences[number] = (seed, self._script.text(seed), len(request.open.prompt_token_ids))
            elif request.HasField("close"):
                sequences.pop(number, None)
                continue
            else:
                traffic.count(OUTCOME_ON, request)
                seed, text, _ = sequences[number]
                length = request.outcome.base_length + len(request.outcome.token_ids)
                sequences[number] = (seed, text, length)
                traffic.outcome_comes(seed, length)
            seed, text, length = sequences[number]
            tree = drafter_pb2.DraftTree(base_length=length, tree=tree_to_proto(text.draft(length)))
            response = drafter_pb2.DraftResponse(sequence_id=number, tree=tree)
            traffic.count(DRAFT_IN, response)
            traffic.draft_leaves(seed, length)
            yield response
