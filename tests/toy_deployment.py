"""A deployment in miniature, for the conformance suite: a toy model behind real validation, sampling and stops.

Each of its steps is a method, so that a test can break one promise at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt

from coppice.core.chance import Purpose, seeded_chance
from coppice.core.chat import ChatTemplate
from coppice.core.draft_distribution import DraftDistribution, truncated
from coppice.core.grammar import Grammar
from coppice.core.log_probs import TokenLogProbs
from coppice.core.sampled_tree import SampledTree
from coppice.core.sampling import output_seed
from coppice.core.tokenizer import TargetTokenizer
from coppice.core.tree import ROOT, TokenTree
from coppice.net.rpc import streaming, unary
from coppice.v1 import inference_pb2, inference_pb2_grpc, sampling_pb2
from coppice.wire.convert import log_probs_to_proto
from drafter_svc.drafters.small_lm.sampled_lm import Path, sample_tree
from orchestrator.api.validation import GenerationRequest, validate, wanted_outputs
from orchestrator.peers.verifier_client import VerifierInfo
from orchestrator.request.output_text import Output
from orchestrator.request.transcript import Transcript
from tests.grpc_listener import listening
from tests.toy_target import EOS, FINGERPRINT, TOKENIZER_JSON, VOCAB
from verifier_svc.grammar.matcher import CompiledGrammar, GrammarVocabulary
from verifier_svc.verify.acceptance import Acceptance
from verifier_svc.verify.log_probs import token_log_probs
from verifier_svc.verify.output_end import FinishReason, OutputEnd, SequenceFinish
from verifier_svc.verify.sampler import Logits
from verifier_svc.verify.token_choice import Constraint, TokenChooser, warm_up
from verifier_svc.verify.traversal import traverse

CONTEXT = 300
MAX_NODES = 6
MAX_OUTPUTS = 5
SOURCE = "toy"
RULES = (sampling_pb2.ACCEPTANCE_RULE_SAMPLE_AND_FOLLOW, sampling_pb2.ACCEPTANCE_RULE_TRAVERSAL)
# Of a sampled tree: children of the root, and of each of them.
WIDTHS = (2, 1, 1)
# Tokens that a draft is drawn from.
DRAWN_FROM = 8
INFO = VerifierInfo(
    model="toy",
    tokenizer_fingerprint=FINGERPRINT,
    vocab_size=VOCAB,
    max_context_tokens=CONTEXT,
    eos_token_ids=(EOS,),
    max_nodes=MAX_NODES,
    exactness=sampling_pb2.EXACTNESS_STRICT,
    version="toy",
    shared_block_tokens=0,
    acceptance_rules=RULES,
)
TOKENIZER = TargetTokenizer(TOKENIZER_JSON)
VOCABULARY = GrammarVocabulary(TOKENIZER_JSON, VOCAB, (EOS,))
# An output that is complete when it is cut off there is complete all the same.
CUT = (FinishReason.LENGTH, FinishReason.CONTEXT_LENGTH)
LETTERS = list(b"abcdefghijklmnopqrstuvwxyz ")


@functools.lru_cache(maxsize=100_000)
def toy_logits(context: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Logits [VOCAB] that depend on the last tokens; letters are far likelier than anything else."""
    logits = np.random.default_rng([len(context), *context]).normal(0, 2, VOCAB).astype(np.float32)
    logits[LETTERS] += 12
    return logits


@functools.lru_cache(maxsize=100_000)
def draft_logits(context: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """What a drafter takes for `toy_logits`: wrong by about as much as it is right."""
    return toy_logits(context) + np.random.default_rng([1, *context]).normal(0, 1, VOCAB).astype(np.float32)


@functools.lru_cache(maxsize=64)
def compiled(grammar: Grammar) -> CompiledGrammar:
    """A grammar at its beginning."""
    return VOCABULARY.compile(grammar)


class ToyDeployment(inference_pb2_grpc.InferenceServiceServicer):
    """Keeps every promise. `pass_s` is how long a round takes."""

    exactness = sampling_pb2.EXACTNESS_STRICT
    sources: tuple[str, ...] = (SOURCE,)
    rules: tuple[sampling_pb2.AcceptanceRule, ...] = RULES
    pass_s = 0.0

    def __init__(self) -> None:
        warm_up(VOCAB)
        self.num_running = 0
        self.num_requests = 0
        self.read: dict[str, list[tuple[int, ...]]] = {}

    @unary
    async def GetModelInfo(self, request: Any, context: Any) -> inference_pb2.GetModelInfoResponse:  # noqa: N802
        return inference_pb2.GetModelInfoResponse(
            model="toy",
            tokenizer_fingerprint=FINGERPRINT,
            vocab_size=VOCAB,
            max_context_tokens=CONTEXT,
            eos_token_ids=[EOS],
            sources=self.sources,
            exactness=self.exactness,
            version="toy",
            max_nodes=MAX_NODES,
            max_outputs=MAX_OUTPUTS,
            acceptance_rules=self.rules,
        )

    @streaming
    async def Generate(  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        heard = inference_pb2.GenerateRequest()
        heard.CopyFrom(request)
        self.hear(heard)
        num_outputs = wanted_outputs(heard, MAX_OUTPUTS)
        valid = await self.check(heard)
        for index in range(num_outputs):
            seed = self.seed(valid.sampling.seed, index)
            one = replace(valid, sampling=replace(valid.sampling, seed=seed))
            async for message in self._answer(one, index, request):
                yield message

    async def _answer(
        self, valid: GenerationRequest, index: int, request: inference_pb2.GenerateRequest
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """The messages of one output."""
        self.num_requests += 1
        self.num_running += 1
        ended = False
        try:
            async for message in _Answer(self, valid, index).messages():
                ended = message.HasField("finished")
                self.say(message, request)
                yield message
        finally:
            self.leave(ended)

    def hear(self, request: inference_pb2.GenerateRequest) -> None:
        """A request as it arrives, which may be changed in place."""

    def say(self, message: inference_pb2.GenerateResponse, request: inference_pb2.GenerateRequest) -> None:
        """A message as it leaves, which may be changed in place."""

    async def check(self, request: inference_pb2.GenerateRequest) -> GenerationRequest:
        """The request, valid."""
        return await validate(
            request, INFO, TOKENIZER, ChatTemplate(""), frozenset(self.sources), self.sources, at_once
        )

    def seed(self, first: int, index: int) -> int:
        """The seed of one of several outputs."""
        return output_seed(first, index)

    def log_probs(self, context: Sequence[int], token: int, request: GenerationRequest) -> TokenLogProbs:
        """What the target thought of a token behind a context."""
        return token_log_probs(toy_logits(tuple(context[-3:])), token, request.top_log_probs or 0)

    def constraint(self, request: GenerationRequest, end_token_ids: Sequence[int]) -> Constraint | None:
        """What the request's grammar allows, where it has one."""
        if request.sampling.grammar is None:
            return None
        return VOCABULARY.begin(compiled(request.sampling.grammar), request.resume_ids, end_token_ids)

    def nodes(self, request: GenerationRequest) -> int:
        """Draft nodes of a round."""
        if not request.speculates or not self.sources:
            return 0
        return MAX_NODES if request.max_nodes is None else min(request.max_nodes, MAX_NODES)

    def draw(self, chooser: TokenChooser, tokens: Sequence[int], request: GenerationRequest, depth: int) -> int:
        """The token behind `tokens`, at a depth of the round's tree."""
        return chooser.choose(toy_logits(tuple(tokens[-3:])), len(tokens))

    def sampled_tree(self, tokens: Sequence[int], request: GenerationRequest, depth: int) -> TokenTree:
        """Draws behind `tokens` of at most this depth, with the distributions that they are from."""

        def predict(paths: Sequence[Path]) -> list[DraftDistribution]:
            rows = [draft_logits((*tokens, *path)[-3:]) for path in paths]
            return [truncated(row, request.sampling.temperature, DRAWN_FROM, max(WIDTHS)) for row in rows]

        chance = seeded_chance(request.sampling.seed, len(tokens), Purpose.DRAFT)
        return sample_tree(WIDTHS[:depth], predict, chance).token_tree(SOURCE)

    def traverse(
        self,
        tree: TokenTree,
        logits: Logits,
        chooser: TokenChooser,
        tokens: Sequence[int],
        request: GenerationRequest,
        is_last: Callable[[int], bool],
    ) -> Acceptance:
        """What a round of traversal verification accepts of a tree behind `tokens`."""
        chance = seeded_chance(request.sampling.seed, len(tokens), Purpose.ACCEPTANCE)
        return traverse(tree, logits, chooser, chance, is_last)

    def leave(self, ended: bool) -> None:
        """A request is over, by its end or before."""
        self.num_running -= 1

    def reused(self, request: GenerationRequest) -> int:
        """Tokens of the prompt that were read before, under the same salt."""
        others = self.read.setdefault(request.cache_salt, [])
        best = max((_shared(request.prompt_ids, other) for other in others), default=0)
        others.append(request.prompt_ids)
        return min(best, len(request.prompt_ids) - 1)


class _Answer:
    """One request under way."""

    def __init__(self, toy: ToyDeployment, request: GenerationRequest, index: int) -> None:
        self._toy, self._request, self._index = toy, request, index
        self._stats = inference_pb2.SpeculationStats()
        self._timing = inference_pb2.Timing(ttft_ms=1.0, total_ms=2.0)
        self._cached = toy.reused(request)
        stopping = request.stopping
        self._transcript = Transcript(
            prompt=request.prompt_ids,
            resumed=request.resume_ids,
            max_tokens=stopping.max_tokens,
            max_context_tokens=CONTEXT,
            stop_token_ids=stopping.stop_token_ids,
            eos_token_ids=() if stopping.ignore_eos else (EOS,),
        )
        self._output = Output(TOKENIZER, self._transcript, stopping, request.want_text)
        self._end = OutputEnd(
            stopping,
            eos_token_ids=(EOS,),
            max_context_tokens=CONTEXT,
            tokenizer=TOKENIZER,
            prompt=request.prompt_ids,
            resumed=request.resume_ids,
        )
        self._chooser = TokenChooser(
            request.sampling,
            VOCAB,
            prompt=request.prompt_ids,
            output=request.resume_ids,
            end_token_ids=self._end.end_token_ids,
            min_tokens=stopping.min_tokens,
        )
        self._chooser.constraint = toy.constraint(request, () if stopping.ignore_eos else (EOS,))

    async def messages(self) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """Deltas, then the end."""
        is_first = True
        finish = self._ended_before()
        while finish is None:
            await asyncio.sleep(self._toy.pass_s)
            finish = self._round()
            if finish is None:
                yield self._delta(is_first)
                is_first = False
        self._output.finish()
        message = self._delta(is_first)
        message.finished.reason = sampling_pb2.FinishReason.Value(f"FINISH_REASON_{finish.reason.name}")
        if finish.stop_match is not None:
            message.finished.stop_match = finish.stop_match
        message.usage.prompt_tokens = len(self._request.prompt_ids)
        message.usage.completion_tokens = self._transcript.num_generated
        message.usage.cached_prompt_tokens = self._cached
        message.speculation.CopyFrom(self._stats)
        message.timing.CopyFrom(self._timing)
        yield message

    def _ended_before(self) -> SequenceFinish | None:
        if self._output.stop_match is not None:
            return SequenceFinish(FinishReason.STOP, self._output.stop_match)
        if (reason := self._transcript.end()) is None:
            return self._end_of_form()
        name = sampling_pb2.FinishReason.Name(reason).removeprefix("FINISH_REASON_")
        is_stop = name == FinishReason.STOP.name
        return SequenceFinish(FinishReason[name], self._output.last_token_text() if is_stop else None)

    def _round(self) -> SequenceFinish | None:
        finishes: list[SequenceFinish | None] = []

        def is_last(token: int) -> bool:
            finish = self._end.push(token)
            if finish is None or finish.reason in CUT:
                finish = self._end_of_form() or finish
            finishes.append(finish)
            return finish is not None

        block = self._sampled_block if self._request.samples_drafts else self._drawn_block
        tokens = block(self._toy.nodes(self._request), is_last)
        before = self._transcript.tokens
        log_probs = [
            self._toy.log_probs([*before, *tokens[:place]], token, self._request)
            for place, token in enumerate(tokens)
            if self._request.top_log_probs is not None
        ]
        self._transcript.append(tokens)
        self._output.push(tokens, log_probs)
        return finishes[-1]

    def _drawn_block(self, nodes: int, is_last: Callable[[int], bool]) -> list[int]:
        """A chain of drafts of which some are right: as many tokens as were guessed, and one more."""
        nodes = min(nodes, self._end.room - 1)
        right = self._transcript.length * 11 // 3 % (nodes + 1)
        tokens: list[int] = []
        while len(tokens) <= right:
            before = [*self._transcript.tokens, *tokens]
            tokens.append(self._toy.draw(self._chooser, before, self._request, len(tokens)))
            self._chooser.push(tokens[-1])
            if is_last(tokens[-1]):
                break
        self._count(nodes, nodes, len(tokens) - 1)
        return tokens

    def _sampled_block(self, nodes: int, is_last: Callable[[int], bool]) -> list[int]:
        """Traversal verification of a sampled tree; where its draws do not fit, a plain round."""
        before = self._transcript.tokens
        tree = self._toy.sampled_tree(before, self._request, self._end.room - 1)
        if not 0 < len(tree) <= nodes:
            return self._drawn_block(0, is_last)
        sampled = SampledTree.of(tree)
        paths = [[tree.token_ids[node] for node in sampled.path(node)] for node in range(ROOT, len(tree))]
        logits = np.stack([toy_logits((*before, *path)[-3:]) for path in paths])
        accepted = self._toy.traverse(tree, logits, self._chooser, before, self._request, is_last)
        self._count(len(tree), tree.depth, len(accepted.nodes))
        return list(accepted.token_ids)

    def _end_of_form(self) -> SequenceFinish | None:
        constraint = self._chooser.constraint
        return SequenceFinish(FinishReason.STOP, None) if constraint is not None and constraint.is_complete else None

    def _count(self, nodes: int, depth: int, accepted: int) -> None:
        self._timing.passes.add(rows=nodes + self._toy.num_running, count=1, total_ms=0.1)
        stats = self._stats
        stats.rounds += 1
        stats.draft_tokens += nodes
        stats.accepted_tokens += accepted
        if not nodes:
            return
        if not stats.sources:
            stats.sources.add(source=SOURCE)
            stats.rounds_drafted_by_depth.extend([0] * MAX_NODES)
            stats.rounds_accepted_by_depth.extend([0] * MAX_NODES)
        stats.sources[0].proposed += nodes
        stats.sources[0].accepted += accepted
        for level in range(depth):
            stats.rounds_drafted_by_depth[level] += 1
            stats.rounds_accepted_by_depth[level] += level < accepted

    def _delta(self, is_first: bool) -> inference_pb2.GenerateResponse:
        delta = self._output.take()
        token_ids = delta.token_ids if self._request.want_token_ids else ()
        message = inference_pb2.GenerateResponse(
            text=delta.text,
            token_ids=token_ids,
            log_probs=log_probs_to_proto(delta.log_probs),
            output_index=self._index,
        )
        if is_first:
            message.request_id, message.seed = self._request.request_id, self._request.sampling.seed
        return message


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that two prompts begin with alike."""
    pairs = zip(one, other, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


@contextlib.asynccontextmanager
async def serving_toy(toy: ToyDeployment) -> AsyncIterator[str]:
    """A toy as a real server; the address is the one to call."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(toy, server)
    async with listening(server) as address:
        yield address


async def at_once(encode: Callable[[], list[int]]) -> list[int]:
    """The encoder of long prompts, without turns."""
    return encode()
