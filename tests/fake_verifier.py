"""A verifier that behaves, without a model: it serves the toy target, which really samples and follows."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc

from coppice.core.stop_strings import StopStringMatcher
from coppice.core.tokenizer import TargetTokenizer
from coppice.core.tree import EMPTY_TREE, TokenTree
from coppice.v1 import sampling_pb2, verifier_pb2, verifier_pb2_grpc
from coppice.wire.convert import add_log_probs, tree_from_proto
from tests.toy_target import (
    CONTEXT,
    EOS,
    FINGERPRINT,
    MODEL,
    TOKENIZER_JSON,
    VOCAB,
    Target,
    babble,
    follow,
    toy_log_probs,
)


@dataclass
class FakeVerifier(verifier_pb2_grpc.VerifierServiceServicer):
    """Serves a toy target. `drop_after` outcomes, it drops its stream, `drops` times."""

    target: Target = babble
    model: str = MODEL
    tokenizer_fingerprint: str = FINGERPRINT
    dtype: str = "float32"
    quantization: str = "none"
    serving_fingerprint: str = "serving"
    target_revision: str = ""
    exactness: sampling_pb2.Exactness = sampling_pb2.EXACTNESS_STRICT
    pass_s: float = 0.001
    # What it says of its passes, whatever they take.
    pass_us: int = 1000
    drops: int = 0
    drop_after: int = 3
    max_context_tokens: int = CONTEXT
    chat_template: str = ""
    # One whose fingerprint is another needs `tokenizer_fingerprint`, too.
    tokenizer_json: bytes = TOKENIZER_JSON
    fails_with: sampling_pb2.FinishReason | int | None = None
    # Fails the sequences with this seed only.
    fails_seed: int | None = None
    # By seed: the passes of its sequences wait until it is set.
    gates: dict[int, asyncio.Event] = field(default_factory=dict)
    shared_block_tokens: int = 0
    row_multiple: int = 0
    # Keeps late drafts and what rounds leave over, as the real one does.
    reroots: bool = False
    # Of every round, as in fast mode.
    near_ties: int = 0
    acceptance_rules: tuple[sampling_pb2.AcceptanceRule, ...] = ()
    hardware: str = ""
    instance_id: str = ""
    num_generated: int = 0
    # What that was when each sequence was opened.
    generated_at_opening: list[int] = field(default_factory=list)
    opened: list[verifier_pb2.OpenSequence] = field(default_factory=list)
    drafts: list[verifier_pb2.Draft] = field(default_factory=list)
    active: set[int] = field(default_factory=set)
    num_closed: int = 0
    num_outcomes: int = 0
    lingers_us: list[int] = field(default_factory=list)
    streams: set[_VerifierStream] = field(default_factory=set)

    def forget(self) -> None:
        """Drop the records of calls, which grow with every one."""
        for record in (self.generated_at_opening, self.opened, self.drafts, self.lingers_us):
            record.clear()

    async def Describe(self, request: Any, context: Any) -> verifier_pb2.VerifierServiceDescribeResponse:  # noqa: N802
        return verifier_pb2.VerifierServiceDescribeResponse(
            model=self.model,
            tokenizer_fingerprint=self.tokenizer_fingerprint,
            vocab_size=VOCAB,
            max_context_tokens=self.max_context_tokens,
            eos_token_ids=[EOS],
            max_nodes=64,
            exactness=self.exactness,
            version="fake",
            shared_block_tokens=self.shared_block_tokens,
            row_multiple=self.row_multiple,
            acceptance_rules=self.acceptance_rules,
            hardware=self.hardware,
            instance_id=self.instance_id,
            dtype=self.dtype,
            quantization=self.quantization,
            serving_fingerprint=self.serving_fingerprint,
            target_revision=self.target_revision,
        )

    async def GetTokenizer(self, request: Any, context: Any) -> verifier_pb2.GetTokenizerResponse:  # noqa: N802
        return verifier_pb2.GetTokenizerResponse(
            tokenizer_json=self.tokenizer_json,
            tokenizer_fingerprint=self.tokenizer_fingerprint,
            chat_template=self.chat_template,
        )

    async def Verify(self, requests: Any, context: Any) -> AsyncIterator[verifier_pb2.VerifyResponse]:  # noqa: N802
        stream = _VerifierStream(self)
        self.streams.add(stream)
        reader = asyncio.create_task(stream.read(requests))
        try:
            while (response := await stream.responses.get()) is not None:
                yield response
                if response.HasField("outcome"):
                    self.num_outcomes += 1
                    if self.drops and self.num_outcomes % self.drop_after == 0:
                        self.drops -= 1
                        await context.abort(grpc.StatusCode.UNAVAILABLE, "dropped")
        finally:
            self.streams.discard(stream)
            reader.cancel()
            stream.close()

    def drain(self) -> None:
        """Say that it is about to stop."""
        self.tell(verifier_pb2.VerifyResponse(draining=verifier_pb2.Draining()))

    def tell(self, news: verifier_pb2.VerifyResponse) -> None:
        """Send a message that belongs to no sequence."""
        for stream in self.streams:
            stream.responses.put_nowait(news)


@dataclass
class _Sequence:
    opening: verifier_pb2.OpenSequence
    tokens: list[int]
    linger_s: float
    mailbox: dict[int, TokenTree] = field(default_factory=dict)
    # With re-rooting: the tree for the coming round, and whether it was made for it.
    kept: TokenTree = EMPTY_TREE
    is_fresh: bool = False
    budget: int = 64
    mail: asyncio.Event = field(default_factory=asyncio.Event)
    stale: int = 0


class _VerifierStream:
    def __init__(self, fake: FakeVerifier) -> None:
        self._fake = fake
        self._sequences: dict[int, _Sequence] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self.responses: asyncio.Queue[verifier_pb2.VerifyResponse | None] = asyncio.Queue()

    async def read(self, requests: Any) -> None:
        async for request in requests:
            number = request.sequence_id
            if request.HasField("open"):
                self._open(number, request.open)
            elif request.HasField("draft"):
                self._draft(number, request.draft)
            elif request.HasField("close"):
                self._fake.num_closed += 1
                self._end(number)
        self.responses.put_nowait(None)

    def close(self) -> None:
        for number in list(self._tasks):
            self._end(number)

    def _end(self, number: int) -> None:
        self._fake.active.discard(number)
        self._sequences.pop(number, None)
        if task := self._tasks.pop(number, None):
            task.cancel()

    def _open(self, number: int, opening: verifier_pb2.OpenSequence) -> None:
        self._fake.opened.append(opening)
        self._fake.generated_at_opening.append(self._fake.num_generated)
        if self._fake.fails_with is not None and self._fake.fails_seed in (None, opening.sampling.seed):
            error = verifier_pb2.SequenceError(
                code=self._fake.fails_with, message="sampling.top_k: no", field="sampling.top_k"
            )
            self.responses.put_nowait(verifier_pb2.VerifyResponse(sequence_id=number, error=error))
            return
        self._fake.active.add(number)
        sequence = _Sequence(opening, list(opening.prompt_token_ids), opening.linger_us / 1e6)
        self._sequences[number] = sequence
        self._tasks[number] = asyncio.create_task(self._run(number, sequence))

    def _draft(self, number: int, draft: verifier_pb2.Draft) -> None:
        self._fake.drafts.append(draft)
        sequence = self._sequences.get(number)
        if sequence is None:
            return
        if draft.HasField("linger_us"):
            sequence.linger_s = draft.linger_us / 1e6
        sequence.budget = draft.budget or sequence.budget
        if self._fake.reroots:
            left = tree_from_proto(draft.tree).descend(sequence.tokens[draft.base_length :])
            is_fresh = draft.base_length == len(sequence.tokens)
            if is_fresh or (len(left) and not sequence.is_fresh):
                sequence.kept, sequence.is_fresh = left, is_fresh
                sequence.mail.set()
            return
        if draft.base_length < len(sequence.tokens):
            sequence.stale += 1
            return
        sequence.mailbox[draft.base_length] = tree_from_proto(draft.tree)
        sequence.mail.set()

    async def _run(self, number: int, sequence: _Sequence) -> None:
        fake, opening = self._fake, sequence.opening
        tokenizer = TargetTokenizer(TOKENIZER_JSON)
        prompt_length = len(opening.prompt_token_ids) - opening.resumed_tokens
        detokenizer = tokenizer.detokenizer(sequence.tokens[:prompt_length])
        matcher = StopStringMatcher(opening.stopping.stop_strings)
        min_tokens = opening.stopping.min_tokens
        for index, token in enumerate(sequence.tokens[prompt_length:]):
            matcher.push_token(token, index, min_tokens, detokenizer)
        while True:
            base = len(sequence.tokens)
            waited_s = await self._linger(sequence, base)
            tree = sequence.mailbox.pop(base, EMPTY_TREE)
            if fake.reroots:
                tree = sequence.kept.prune(sequence.budget)
            if gate := fake.gates.get(opening.sampling.seed):
                await gate.wait()
            await asyncio.sleep(fake.pass_s)
            committed, accepted = follow(fake.target, sequence.tokens, opening.sampling.seed, tree)
            finish = None
            kept: list[int] = []
            for token in committed:
                kept.append(token)
                index = len(sequence.tokens) - prompt_length
                sequence.tokens.append(token)
                matcher.push_token(token, index, min_tokens, detokenizer)
                finish = self._finish(sequence, prompt_length, matcher, tokenizer)
                if finish is not None:
                    break
            sequence.kept, sequence.is_fresh = sequence.kept.descend(kept), False
            fake.num_generated += len(kept)
            fake.lingers_us.append(round(waited_s * 1e6))
            outcome = verifier_pb2.Outcome(
                base_length=base,
                token_ids=kept,
                accepted_nodes=accepted[: len(kept)],
                draft_nodes=len(tree),
                draft_depth=tree.depth,
                pass_rows=1 + len(tree),
                pass_us=self._fake.pass_us,
                linger_us=round(waited_s * 1e6),
                stale_drafts=sequence.stale,
                near_ties=self._fake.near_ties,
            )
            sequence.stale = 0
            if opening.HasField("top_log_probs"):
                num_top = opening.top_log_probs
                add_log_probs(outcome, [toy_log_probs(base + at, token, num_top) for at, token in enumerate(kept)])
            self.responses.put_nowait(verifier_pb2.VerifyResponse(sequence_id=number, outcome=outcome))
            if finish is not None:
                self.responses.put_nowait(verifier_pb2.VerifyResponse(sequence_id=number, finished=finish))
                self._fake.active.discard(number)
                self._tasks.pop(number, None)
                self._sequences.pop(number, None)
                return

    async def _linger(self, sequence: _Sequence, base: int) -> float:
        loop = asyncio.get_running_loop()
        started = loop.time()
        with contextlib.suppress(TimeoutError):
            while (
                not sequence.is_fresh
                and base not in sequence.mailbox
                and (left := started + sequence.linger_s - loop.time()) > 0
            ):
                sequence.mail.clear()
                async with asyncio.timeout(left):
                    await sequence.mail.wait()
        return loop.time() - started

    def _finish(
        self, sequence: _Sequence, prompt_length: int, matcher: StopStringMatcher, tokenizer: TargetTokenizer
    ) -> verifier_pb2.SequenceFinished | None:
        stopping = sequence.opening.stopping
        token = sequence.tokens[-1]
        if token == EOS and not stopping.ignore_eos:
            return verifier_pb2.SequenceFinished(reason=sampling_pb2.FINISH_REASON_EOS, queue_us=5)
        if token in stopping.stop_token_ids:
            text = tokenizer.token_text(token)
            return verifier_pb2.SequenceFinished(reason=sampling_pb2.FINISH_REASON_STOP, stop_match=text)
        if matcher.match is not None:
            return verifier_pb2.SequenceFinished(reason=sampling_pb2.FINISH_REASON_STOP, stop_match=matcher.match)
        if stopping.HasField("max_tokens") and len(sequence.tokens) - prompt_length >= stopping.max_tokens:
            return verifier_pb2.SequenceFinished(reason=sampling_pb2.FINISH_REASON_LENGTH, queue_us=5)
        if len(sequence.tokens) >= self._fake.max_context_tokens:
            return verifier_pb2.SequenceFinished(reason=sampling_pb2.FINISH_REASON_CONTEXT_LENGTH)
        return None
