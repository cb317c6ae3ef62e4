"""A verifier and a drafter that answer at once, as a script says, with clients, in a process of their own.

All the time that passes is the orchestrator's, and so is the CPU time of the other process.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, fields
from multiprocessing.connection import Connection
from typing import Any

from google.protobuf.message import Message

from coppice.checkpoints.bundled import MODELS
from coppice.client import Client, Options
from coppice.core.tokenizer import TargetTokenizer, load_tokenizer_json
from coppice.core.tree import EMPTY_TREE, ROOT, TokenTree
from coppice.lab.bench.overhead.draft_trees import ScriptedText
from coppice.net.rpc import Server, run
from coppice.v1 import drafter_pb2, drafter_pb2_grpc, sampling_pb2, verifier_pb2, verifier_pb2_grpc
from coppice.version import VERSION
from coppice.wire.convert import tree_from_proto, tree_to_proto
from orchestrator.prefix_cache.guesses import SOURCE as CACHE

KIND = "scripted"
# What outcomes say of their pass, though it took no time. All of them say the same, so that the planner takes one round
# of each request for a pass, as it is where a verifier's passes take as long as they say.
PASS_US = 20_000
PASS_ROWS = 1024
# A round that waits for a draft which does not come goes on without it.
PATIENCE_S = 5.0
MAX_CONTEXT_TOKENS = 1 << 20
# Tokens of a round, so that an output of a given length has about so many rounds.
TOKENS_PER_ROUND = 2.5
# Of a drafter that drafts ahead.
AHEAD_TREES = 16
PROMPT_TOKENS = 200
# The four ways of a round's messages.
OUTCOME_IN, OUTCOME_ON, DRAFT_IN, DRAFT_ON = (
    "verifier to orchestrator",
    "orchestrator to drafter",
    "drafter to orchestrator",
    "orchestrator to verifier",
)


@dataclass
class Traffic:
    """Messages and bytes by direction, and how long the orchestrator took with each round that had a draft.

    A round's time is that from the outcome's leaving the verifier to its coming to the drafter, and from the draft's
    leaving the drafter to its coming to the verifier: both ways through the network and two services' libraries.
    """

    messages: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    largest: Counter[str] = field(default_factory=Counter)
    num_rounds: int = 0
    round_us: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        # By way, request and committed length: when a message left, and how long outcomes took.
        self._left_s: dict[tuple[str, int, int], float] = {}
        self._to_drafter_s: dict[tuple[int, int], float] = {}

    def reset(self) -> None:
        vars(self).update(vars(Traffic()))

    def count(self, way: str, message: Message) -> None:
        size = message.ByteSize()
        self.messages[way] += 1
        self.bytes[way] += size
        self.largest[way] = max(self.largest[way], size)

    def leaves(self, way: str, request: int, length: int) -> None:
        """A peer sends an outcome after which so many tokens are committed, or a draft that follows so many."""
        self.num_rounds += way == OUTCOME_IN
        self._left_s[way, request, length] = time.perf_counter()

    def outcome_comes(self, request: int, length: int) -> None:
        if (left_s := self._left_s.pop((OUTCOME_IN, request, length), None)) is not None:
            self._to_drafter_s[request, length] = time.perf_counter() - left_s

    def draft_comes(self, request: int, length: int) -> None:
        left_s = self._left_s.pop((DRAFT_IN, request, length), None)
        there_s = self._to_drafter_s.pop((request, length), None)
        if left_s is not None and there_s is not None:
            self.round_us.append(1e6 * (there_s + time.perf_counter() - left_s))


@dataclass
class Script:
    """What both peers have in common."""

    tokenizer: TargetTokenizer
    tokenizer_json: bytes
    num_nodes: int = 1
    # Whether the text is one that the prefix cache knows.
    repeats: bool = False
    traffic: Traffic = field(default_factory=Traffic)

    def text(self, seed: int) -> ScriptedText:
        """The text of the request with this seed, which names it to both peers."""
        return ScriptedText(seed, self.tokenizer.vocab_size, self.num_nodes, self.repeats)


class ScriptedVerifier(verifier_pb2_grpc.VerifierServiceServicer):
    """Commits the script's text, and of a draft what agrees with it, as soon as the draft is there."""

    def __init__(self, script: Script) -> None:
        self._script = script

    async def Describe(self, request: Any, context: Any) -> verifier_pb2.VerifierServiceDescribeResponse:  # noqa: N802
        return verifier_pb2.VerifierServiceDescribeResponse(
            model=KIND,
            tokenizer_fingerprint=self._script.tokenizer.fingerprint,
            vocab_size=self._script.tokenizer.vocab_size,
            max_context_tokens=MAX_CONTEXT_TOKENS,
            max_nodes=1024,
            exactness=sampling_pb2.EXACTNESS_STRICT,
            version=VERSION,
        )

    async def GetTokenizer(self, request: Any, context: Any) -> verifier_pb2.GetTokenizerResponse:  # noqa: N802
        return verifier_pb2.GetTokenizerResponse(
            tokenizer_json=self._script.tokenizer_json, tokenizer_fingerprint=self._script.tokenizer.fingerprint
        )

    async def Verify(self, requests: Any, context: Any) -> AsyncIterator[verifier_pb2.VerifyResponse]:  # noqa: N802
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
            match request.WhichOneof("event"):
                case "open":
                    sequences[request.sequence_id] = _Sequence(request, self._script, responses)
                    # A prompt's round waits for no draft.
                    sequences[request.sequence_id].run(EMPTY_TREE)
                case "draft" if request.sequence_id in sequences:
                    self._script.traffic.count(DRAFT_ON, request)
                    sequences[request.sequence_id].on_draft(request.draft)
                case "close":
                    sequences.pop(request.sequence_id, None)


class _Sequence:
    def __init__(
        self, request: verifier_pb2.VerifyRequest, script: Script, responses: asyncio.Queue[verifier_pb2.VerifyResponse]
    ) -> None:
        opening = request.open
        self._number, self._seed = request.sequence_id, opening.sampling.seed
        self._length = len(opening.prompt_token_ids)
        self._end = self._length + opening.stopping.max_tokens
        self._lingers = opening.linger_us > 0
        self._text, self._traffic, self._responses = script.text(self._seed), script.traffic, responses
        self._timer: asyncio.TimerHandle | None = None

    def on_draft(self, draft: verifier_pb2.Draft) -> None:
        if draft.HasField("linger_us"):
            self._lingers = draft.linger_us > 0
        if draft.base_length != self._length or self._timer is None:
            return
        # An empty tree means that none will come.
        if draft.tree.token_ids:
            self._traffic.draft_comes(self._seed, self._length)
        self.run(tree_from_proto(draft.tree) if draft.tree.token_ids else EMPTY_TREE)

    def run(self, tree: TokenTree) -> None:
        """One round, and at once the next where none waits for a draft."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        outcome = self._outcome(tree)
        self._length += len(outcome.token_ids)
        response = verifier_pb2.VerifyResponse(sequence_id=self._number, outcome=outcome)
        self._traffic.count(OUTCOME_IN, response)
        self._traffic.leaves(OUTCOME_IN, self._seed, self._length)
        self._responses.put_nowait(response)
        if self._length >= self._end:
            finished = verifier_pb2.SequenceFinished(reason=sampling_pb2.FINISH_REASON_LENGTH)
            self._responses.put_nowait(verifier_pb2.VerifyResponse(sequence_id=self._number, finished=finished))
            return
        delay_s = PATIENCE_S if self._lingers else PASS_US / 1e6
        self._timer = asyncio.get_running_loop().call_later(delay_s, self.run, EMPTY_TREE)

    def _outcome(self, tree: TokenTree) -> verifier_pb2.Outcome:
        accepted: list[int] = []
        token_ids = [self._text.token(self._length)]
        node = ROOT
        while len(token_ids) < self._end - self._length:
            child = tree.children.get((node, token_ids[-1]))
            if child is None:
                break
            node = child
            accepted.append(node)
            token_ids.append(self._text.token(self._length + len(token_ids)))
        return verifier_pb2.Outcome(
            base_length=self._length,
            token_ids=token_ids,
            accepted_nodes=accepted,
            draft_nodes=len(tree),
            draft_depth=tree.depth,
            pass_rows=PASS_ROWS,
            pass_us=PASS_US,
        )


class ScriptedDrafter(drafter_pb2_grpc.DrafterServiceServicer):
    """Answers every outcome at once with the script's tree, and drafts ahead if it is to."""

    def __init__(self, script: Script, *, drafts_ahead: bool = False) -> None:
        self.script = script
        self.drafts_ahead = drafts_ahead

    def _ahead(self, request: drafter_pb2.DraftRequest, seed: int, length: int) -> drafter_pb2.DraftResponse:
        """Trees after other outcomes than those of the expected tree's longest paths, as many nodes in all as usual."""
        expected = tree_from_proto(request.expect.tree)
        response = drafter_pb2.DraftResponse(sequence_id=request.sequence_id)
        following = self.script.text(seed).draft(length).first(self.script.num_nodes // AHEAD_TREES)
        for path in sorted(expected.paths(), key=len)[-AHEAD_TREES:]:
            assumed = (*path, (path[-1] + 1) % self.script.tokenizer.vocab_size)
            response.ahead.trees.add(
                base_length=length, tree=tree_to_proto(following), assumed_token_ids=assumed, outcome_log_prob=-1.0
            )
        return response

    async def Describe(self, request: Any, context: Any) -> drafter_pb2.DrafterServiceDescribeResponse:  # noqa: N802
        return drafter_pb2.DrafterServiceDescribeResponse(
            kind=KIND,
            model=KIND,
            tokenizer_fingerprint=self.script.tokenizer.fingerprint,
            vocab_size=self.script.tokenizer.vocab_size,
            drafts_ahead=self.drafts_ahead,
        )

    async def Draft(self, requests: Any, context: Any) -> AsyncIterator[drafter_pb2.DraftResponse]:  # noqa: N802
        traffic = self.script.traffic
        # Seed and committed length.
        sequences: dict[int, tuple[int, int]] = {}
        async for request in requests:
            number = request.sequence_id
            match request.WhichOneof("event"):
                case "close":
                    sequences.pop(number, None)
                    continue
                case "open":
                    sequences[number] = request.open.sampling.seed, len(request.open.prompt_token_ids)
                case "expect":
                    traffic.count(OUTCOME_ON, request)
                    if number in sequences:
                        response = self._ahead(request, *sequences[number])
                        traffic.count(DRAFT_IN, response)
                        yield response
                    continue
                case "outcome":
                    traffic.count(OUTCOME_ON, request)
                    length = request.outcome.base_length + len(request.outcome.token_ids)
                    sequences[number] = sequences[number][0], length
                    traffic.outcome_comes(*sequences[number])
            seed, length = sequences[number]
            tree = tree_to_proto(self.script.text(seed).draft(length))
            response = drafter_pb2.DraftResponse(
                sequence_id=number, tree=drafter_pb2.DraftTree(base_length=length, tree=tree)
            )
            traffic.count(DRAFT_IN, response)
            traffic.leaves(DRAFT_IN, seed, length)
            yield response


@dataclass(frozen=True, slots=True)
class RunSettings:
    """One run: so many requests at once at an orchestrator's address, each of about so many rounds."""

    address: str
    num_requests: int
    num_rounds: int
    warm_up_rounds: int
    num_nodes: int
    repeats: bool


async def serve(script: Script, *, drafts_ahead: bool = False) -> tuple[list[Server], dict[str, str]]:
    """The peers on ports of their own, and their addresses."""
    servers = {"verifier": Server([], guarded=False), "drafter": Server([], guarded=False)}
    verifier_pb2_grpc.add_VerifierServiceServicer_to_server(ScriptedVerifier(script), servers["verifier"].grpc)
    drafter_pb2_grpc.add_DrafterServiceServicer_to_server(
        ScriptedDrafter(script, drafts_ahead=drafts_ahead), servers["drafter"].grpc
    )
    ports = {name: await server.start("127.0.0.1:0") for name, server in servers.items()}
    return list(servers.values()), {name: f"127.0.0.1:{port}" for name, port in ports.items()}


def make_script() -> Script:
    """With the bundled target's tokenizer."""
    tokenizer_json = load_tokenizer_json(MODELS / "target")
    return Script(TargetTokenizer(tokenizer_json), tokenizer_json)


async def load(client: Client, settings: RunSettings, num_rounds: int, first_seed: int) -> None:
    """Complete so many requests at once, each of about so many rounds."""
    max_tokens = round(TOKENS_PER_ROUND * num_rounds)
    sources = f"{KIND},{CACHE}" if settings.repeats else KIND

    async def request(seed: int) -> None:
        prompt = [(seed * 7 + at * 3) % 256 for at in range(PROMPT_TOKENS)]
        # Forced: every round is to have a draft, whatever the planner thinks of these peers. It learns all the same.
        options = Options(max_tokens=max_tokens, temperature=0.0, seed=seed, ignore_eos=True, speculation=sources)
        completion = await client.generate(prompt, options)
        assert len(completion.token_ids) == max_tokens

    async with asyncio.TaskGroup() as tasks:
        for seed in range(first_seed, first_seed + settings.num_requests):
            tasks.create_task(request(seed))


def run_peers(connection: Connection) -> None:
    """Serve; tell the addresses, and of each run that comes when it is warm and, after a word, what was seen."""
    run(lambda: _run_peers(connection))


async def _run_peers(connection: Connection) -> None:
    script = make_script()
    servers, addresses = await serve(script)
    connection.send(addresses)
    while (settings := await asyncio.to_thread(connection.recv)) is not None:
        script.num_nodes, script.repeats = settings.num_nodes, settings.repeats
        async with Client(settings.address) as client:
            await load(client, settings, settings.warm_up_rounds, first_seed=1)
            connection.send("warm")
            await asyncio.to_thread(connection.recv)
            script.traffic.reset()
            await load(client, settings, settings.num_rounds, first_seed=1 + settings.num_requests)
        connection.send({one.name: getattr(script.traffic, one.name) for one in fields(Traffic)})
    for server in servers:
        await server.stop(0.0)
