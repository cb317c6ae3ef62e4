"""Sequences of all streams: opening, grammars, drafts, failure and removal."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeAlias, TypeVar

from coppice.core.errors import CoppiceError, InvalidRequestError, InvalidTreeError, OverloadedError
from coppice.core.grammar import Grammar
from coppice.core.tokenizer import TargetTokenizer
from coppice.obs.logs import of_request
from verifier_svc.engine.counts import EngineCounts
from verifier_svc.engine.scheduler import Scheduler
from verifier_svc.engine.sequence import Draft, Sequence, SequenceKey, SequenceSpec
from verifier_svc.grammar.compiler import GrammarCompiler
from verifier_svc.model.target_model import TargetInfo
from verifier_svc.stream.events import CompleteEvent, DraftRejection, ErrorEvent
from verifier_svc.stream.outbox import Outbox
from verifier_svc.verify.token_choice import Constraint

logger = logging.getLogger(__name__)

Command: TypeAlias = Callable[[], None]
Result = TypeVar("Result")


class OpenSequences:
    """Adds sequences to the scheduler and removes them. For the engine's thread only.

    An error of one sequence ends only that one.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        outbox: Outbox,
        counts: EngineCounts,
        info: TargetInfo,
        max_nodes: int,
        clock: Callable[[], float],
        call: Callable[[Command], None],
    ) -> None:
        """`call` executes a command on the engine's thread; it is thread-safe."""
        self._scheduler = scheduler
        self._outbox = outbox
        self._counts = counts
        self._info = info
        self._max_nodes = max_nodes
        self._clock = clock
        self._call = call
        self._tokenizer = TargetTokenizer(info.tokenizer_json)
        self.grammars = GrammarCompiler(info.tokenizer_json, info.vocab_size, info.eos_token_ids)
        # Cancels compilation of a waiting sequence's grammar.
        self._compiling: dict[SequenceKey, Callable[[], None]] = {}

    def open(self, key: SequenceKey, spec: SequenceSpec) -> None:
        """Queue a sequence, or report an error."""
        self.alone(key, lambda: self._open(key, spec))

    def submit(self, key: SequenceKey, draft: Draft, came_s: float) -> None:
        """Put a draft that arrived at `came_s` into a sequence's mailbox, if it is open, or report an error."""
        self.alone(key, lambda: self._submit(key, draft, came_s))

    def close(self, key: SequenceKey) -> None:
        """Free a sequence; a no-op if unknown."""
        cancel = self._compiling.pop(key, None)
        if cancel is not None:
            cancel()
        self._scheduler.remove(key)

    def close_stream(self, stream: int) -> None:
        """Free all sequences of a stream."""
        for key in self._scheduler.all_keys():
            if key.stream == stream:
                self.close(key)

    def finish(self, key: SequenceKey, reason: str) -> None:
        """Count and remove a finished sequence."""
        self._counts.finished[reason] += 1
        self._scheduler.remove(key)

    def fail(self, key: SequenceKey, error: CoppiceError) -> None:
        """Remove a sequence with an error."""
        self._scheduler.remove(key)
        self._refuse(key, error)

    def fail_with_pass(self, key: SequenceKey) -> None:
        """Fail a sequence of a failed pass."""
        sequence = self._scheduler.find(key)
        extra = of_request(sequence.request_id if sequence is not None else "")
        logger.error("sequence %d of stream %d failed with a pass", key.sequence_id, key.stream, extra=extra)
        self.fail(key, CoppiceError("the forward pass failed"))

    def alone(self, key: SequenceKey, action: Callable[[], Result]) -> Result | None:
        """Run an action of one sequence; an error ends only that sequence."""
        try:
            return action()
        except Exception as error:  # other sequences continue
            # Trees were checked on arrival: an invalid one is not the client's error.
            if isinstance(error, InvalidTreeError) or not isinstance(error, InvalidRequestError):
                logger.exception("sequence %d of stream %d cannot go on", key.sequence_id, key.stream)
                error = CoppiceError("the verifier failed")
            self.fail(key, error)
            return None

    def _open(self, key: SequenceKey, spec: SequenceSpec) -> None:
        if self._scheduler.find(key) is not None:
            self._refuse(key, InvalidRequestError("sequence_id", "is already open"))
            return
        sequence = Sequence(
            spec,
            self._info,
            self._tokenizer,
            max_nodes=self._max_nodes,
            opened_s=self._clock(),
            counts=self._counts.drafts,
        )
        if not self._scheduler.can_ever_run(sequence):
            text = "prompt and output need more KV cache than the server has"
            self._refuse(key, InvalidRequestError("stopping.max_tokens", text))
        elif not self._scheduler.has_room_to_wait():
            self._refuse(key, OverloadedError("the verifier's queue is full"))
        else:
            self._scheduler.add(key, sequence)
            if spec.sampling.grammar is not None:
                self._compile(key, sequence, spec.sampling.grammar, spec.cache_salt)

    def _compile(self, key: SequenceKey, sequence: Sequence, grammar: Grammar, salt: str) -> None:
        """Compile a sequence's grammar; only this sequence waits for it.

        Sequences of the same salt share their turns.
        """

        def deliver(result: Constraint | CoppiceError) -> None:
            self._call(lambda: self.alone(key, lambda: self._constrain(key, sequence, result)))

        self._compiling[key] = self.grammars.begin(grammar, sequence.resumed, sequence.eos_token_ids, deliver, salt)

    def _constrain(self, key: SequenceKey, sequence: Sequence, result: Constraint | CoppiceError) -> None:
        if self._scheduler.find(key) is not sequence:
            return  # closed meanwhile
        self._compiling.pop(key, None)
        if isinstance(result, CoppiceError):
            self.fail(key, result)
        elif (finish := sequence.constrain(result)) is not None:
            self.finish(key, finish.reason.value)
            self._outbox.put(key.stream, CompleteEvent(key.sequence_id, finish, self._clock() - sequence.opened_s))

    def _submit(self, key: SequenceKey, draft: Draft, came_s: float) -> None:
        sequence = self._scheduler.find(key)
        if sequence is None:
            return
        try:
            sequence.submit(draft, came_s)
        except InvalidTreeError as error:
            self._outbox.put(key.stream, DraftRejection(key.sequence_id, draft.base_length, error))

    def _refuse(self, key: SequenceKey, error: CoppiceError) -> None:
        self._counts.sequence_failed(error)
        self._outbox.put(key.stream, ErrorEvent(key.sequence_id, error))
