"""The model thread: commands in, passes back to back, events out. The event loop never runs the model."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

import numpy as np

from coppice.core.errors import CoppiceError, InvalidRequestError, InvalidTreeError, OverloadedError
from coppice.core.grammar import Grammar
from coppice.core.noise import gumbel
from coppice.core.tokenizer import TargetTokenizer
from coppice.obs.logs import of_request
from coppice.obs.timeline import Timeline
from verifier_svc.engine.counts import EngineCounts
from verifier_svc.engine.draft_counts import DraftCounts
from verifier_svc.engine.pass_runner import PassPart, PassRunner
from verifier_svc.engine.round_outcome import RoundOutcome
from verifier_svc.engine.scheduler import Scheduler, SchedulerLimits
from verifier_svc.engine.sequence import Draft, SequenceKey, SequenceSpec
from verifier_svc.engine.sequence import Sequence as RunningSequence
from verifier_svc.extras.redraft.redraft import redraft_tree
from verifier_svc.grammar.compiler import GrammarCompiler
from verifier_svc.model.target_model import TargetInfo, TargetModel
from verifier_svc.stream.events import CompleteEvent, DraftRejection, ErrorEvent, LoadEvent, OutcomeEvent
from verifier_svc.stream.outbox import Outbox, Sink
from verifier_svc.verify.token_choice import Constraint

logger = logging.getLogger(__name__)

LOAD_INTERVAL_S = 0.1
# How long a wait for drafts stays idle: the event loop shares the interpreter with us, and has outcomes to send first.
QUIET_S = 0.0005

Command: TypeAlias = Callable[[], None]
Result = TypeVar("Result")


class Engine:
    """Runs one target on its own thread. All public methods may be called from any thread.

    Events reach each stream's sink in batches, on the engine's thread.
    """

    def __init__(
        self,
        target: TargetModel,
        info: TargetInfo,
        limits: SchedulerLimits,
        max_nodes: int,
        clock: Callable[[], float] = time.monotonic,
        timeline: Timeline | None = None,
    ) -> None:
        """`timeline` is told of every pass."""
        self._timeline = timeline
        self._target = target
        self._info = info
        self._limits = limits
        self._max_nodes = max_nodes
        self._clock = clock
        self._tokenizer = TargetTokenizer(info.tokenizer_json)
        self.grammars = GrammarCompiler(info.tokenizer_json, info.vocab_size, info.eos_token_ids)
        # What takes a sequence's grammar out of the queue again, while it waits.
        self._compiling: dict[SequenceKey, Callable[[], None]] = {}
        self._scheduler = Scheduler(target.cache, limits)
        self.passes = PassRunner(target, info.pruning)
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._outbox = Outbox()
        self._next_load_s = 0.0
        # Sequences of the last pass that will wait for drafts and have not used the wait yet.
        self._unprepared: list[RunningSequence] = []
        self._stopping = False
        self._num_tokens = 0
        self._num_near_ties = 0
        # For operators.
        self.counts = EngineCounts()
        self.drafts = DraftCounts()
        self._on_death: Callable[[], object] | None = None
        self._thread = threading.Thread(target=self._run, name="verifier-model", daemon=True)

    @property
    def num_preemptions(self) -> int:
        """How often a sequence had to make room for others so far."""
        return self._scheduler.num_preemptions

    @property
    def num_recomputed_tokens(self) -> int:
        """Tokens computed another time so far, after preemptions and at rope boundaries.

        Added up when a sequence gives its blocks back.
        """
        return self._scheduler.num_recomputed_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens committed so far."""
        return self._num_tokens

    @property
    def num_near_ties(self) -> int:
        """Those of them that were chosen at a near-tie; none are counted in strict mode."""
        return self._num_near_ties

    @property
    def num_running(self) -> int:
        """Sequences that take part in passes."""
        return self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for room."""
        return self._scheduler.num_waiting

    @property
    def num_free_blocks(self) -> int:
        """Blocks of the KV cache that no sequence uses."""
        return self._target.cache.num_free_blocks

    @property
    def num_blocks(self) -> int:
        """All blocks of the KV cache."""
        return self._target.cache.num_blocks

    @property
    def num_reusable_blocks(self) -> int:
        """Free blocks that hold what a prompt may begin with."""
        return self._target.cache.num_reusable_blocks

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens that sequences had when they first started."""
        return self._scheduler.num_prompt_tokens

    @property
    def num_cached_tokens(self) -> int:
        """Those of them whose keys and values others had computed."""
        return self._scheduler.num_cached_tokens

    def start(self, on_death: Callable[[], object] | None = None) -> None:
        """Start the model thread, which calls `on_death` when it ends without having been stopped."""
        self._on_death = on_death
        # Compiled at its first use, which should not be a request's.
        gumbel(0, 0, 1, self._info.vocab_size)
        if self._info.redraft is not None:
            redraft_tree(np.zeros((1, self._info.vocab_size), np.float32), [0], 0, self._info.redraft, 0.0, 1)
        self._thread.start()

    def stop(self) -> None:
        """Stop after the pass that runs now; waits for the thread."""
        self._commands.put(None)
        self._thread.join()
        self.grammars.close()

    def attach(self, stream: int, sink: Sink) -> None:
        """Events of a stream's sequences go to `sink` from now on."""
        self._commands.put(lambda: self._outbox.attach(stream, sink))

    def detach(self, stream: int) -> None:
        """The stream is gone: so are its sequences."""
        self._commands.put(lambda: self._detach(stream))

    def open(self, key: SequenceKey, spec: SequenceSpec) -> None:
        """Queue a sequence; refusals come as events."""
        self._commands.put(lambda: self._alone(key, lambda: self._open(key, spec)))

    def submit(self, key: SequenceKey, draft: Draft) -> None:
        """Put a draft into a sequence's mailbox, unless the sequence is gone; a refusal comes as an event."""
        came_s = self._clock()
        self._commands.put(lambda: self._alone(key, lambda: self._submit(key, draft, came_s)))

    def close(self, key: SequenceKey) -> None:
        """Free a sequence; unknown ones are fine, since it may just have finished."""
        self._commands.put(lambda: self._close(key))

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._step()
            self._deliver()
        except BaseException:  # whatever it was: nothing is computed any more
            logger.exception("the model thread has ended")
            if self._on_death is not None:
                self._on_death()

    def _step(self) -> None:
        """Carry out what has arrived, and run a pass if one may start.

        What came of it is delivered at once if nothing else is to do, else before the next one's forward: the event
        loop then sends it while we hardly need the interpreter, and does not hold up the planning of the pass.
        """
        # Finished sequences may have made room: look before waiting for commands, and again after them.
        self._scheduler.admit(self._clock())
        self._take_commands()
        self._scheduler.admit(self._clock())
        start_s = self._scheduler.next_start_s()
        if start_s is not None and start_s <= self._clock():
            self._run_pass()
            start_s = self._scheduler.next_start_s()
        if start_s is None or start_s > self._clock():
            self._deliver()

    def _take_commands(self) -> None:
        """Carry out what has arrived; wait for more while no pass may start."""
        start_s = self._scheduler.next_start_s()
        if start_s is None:
            self.counts.nothing_runs()
        timeout = None if start_s is None else start_s - self._clock()
        if timeout is not None and timeout > QUIET_S and self._unprepared:
            self._wait_or_prepare()
            return
        try:
            if timeout is None or timeout > 0:
                self._deliver()
                self._carry_out(self._commands.get(timeout=timeout))
            while True:
                self._carry_out(self._commands.get_nowait())
        except queue.Empty:
            pass

    def _wait_or_prepare(self) -> None:
        """Use a wait for drafts: once the event loop has had time to send outcomes, get ready for the next round."""
        self._deliver()
        try:
            self._carry_out(self._commands.get(timeout=QUIET_S))
        except queue.Empty:
            for sequence in self._unprepared:
                sequence.prepare()
            self._unprepared = []

    def _carry_out(self, command: Command | None) -> None:
        if command is None:
            self._stopping = True
        else:
            command()

    def _detach(self, stream: int) -> None:
        self._outbox.detach(stream)
        for key in self._scheduler.all_keys():
            if key.stream == stream:
                self._close(key)

    def _close(self, key: SequenceKey) -> None:
        cancel = self._compiling.pop(key, None)
        if cancel is not None:
            cancel()
        self._scheduler.remove(key)

    def _open(self, key: SequenceKey, spec: SequenceSpec) -> None:
        if self._scheduler.find(key) is not None:
            self._refuse(key, InvalidRequestError("sequence_id", "is already open"))
            return
        sequence = RunningSequence(
            spec, self._info, self._tokenizer, max_nodes=self._max_nodes, opened_s=self._clock(), counts=self.drafts
        )
        if not self._scheduler.can_ever_run(sequence):
            error: CoppiceError = InvalidRequestError(
                "stopping.max_tokens", "prompt and output need more KV cache than the server has"
            )
        elif not self._scheduler.has_room_to_wait():
            error = OverloadedError("the verifier's queue is full")
        else:
            self._scheduler.add(key, sequence)
            if spec.sampling.grammar is not None:
                self._compile(key, sequence, spec.sampling.grammar, spec.cache_salt)
            return
        self._refuse(key, error)

    def _compile(self, key: SequenceKey, sequence: RunningSequence, grammar: Grammar, salt: str) -> None:
        """Have a sequence's grammar compiled; the sequence waits for it, and nothing else does.

        Sequences of the same salt share their turns.
        """

        def deliver(result: Constraint | CoppiceError) -> None:
            self._commands.put(lambda: self._alone(key, lambda: self._constrain(key, sequence, result)))

        self._compiling[key] = self.grammars.begin(grammar, sequence.resumed, sequence.eos_token_ids, deliver, salt)

    def _constrain(self, key: SequenceKey, sequence: RunningSequence, result: Constraint | CoppiceError) -> None:
        if self._scheduler.find(key) is not sequence:
            return  # closed meanwhile
        self._compiling.pop(key, None)
        if isinstance(result, CoppiceError):
            self._scheduler.remove(key)
            self._refuse(key, result)
        elif (finish := sequence.constrain(result)) is not None:
            self._scheduler.remove(key)
            self.counts.finished[finish.reason.value] += 1
            self._outbox.put(key.stream, CompleteEvent(key.sequence_id, finish, self._clock() - sequence.opened_s))

    def _submit(self, key: SequenceKey, draft: Draft, came_s: float) -> None:
        sequence = self._scheduler.find(key)
        if sequence is None:
            return
        try:
            sequence.submit(draft, came_s)
        except InvalidTreeError as error:
            self._outbox.put(key.stream, DraftRejection(key.sequence_id, draft.base_length, error))

    def _run_pass(self) -> None:
        """One forward pass over every sequence that is ready, and what follows from its logits."""
        started_s = self._clock()
        shares = self._scheduler.next_batch(started_s)
        if not shares:
            return
        try:
            work = [share.sequence.next_rows(share.num_pending, share.max_nodes, share.max_masks) for share in shares]
            plan = self._target.plan(work)
            self._deliver()
            forward_s = self._clock()
            result = self.passes.run(plan)
        except Exception:  # out of memory, a failed kernel: these sequences fail, others go on
            logger.exception("a pass over %d sequences failed", len(shares))
            self.counts.pass_failed()
            self._fail([share.key for share in shares])
            return
        ended_s = self._clock()
        bubble_s = self.counts.pass_over(plan.num_rows, forward_s, ended_s)
        if self._timeline is not None:
            ids = [share.key.sequence_id for share in shares]
            self._timeline.took("pass", forward_s, ended_s, size=plan.num_rows, sequences=ids)
        outcomes: list[RoundOutcome] = []
        for share, part in zip(shares, result.parts(), strict=True):
            key, sequence = share.key, share.sequence
            waited_s = started_s - sequence.last_outcome_s if sequence.may_linger else 0.0
            outcome = self._finish_round(key, sequence, part, ended_s, waited_s)
            if outcome is None:
                continue
            outcomes.append(outcome)
            self._num_tokens += len(outcome.token_ids)
            self._num_near_ties += outcome.near_ties
            queue_s = sequence.started_s - sequence.opened_s
            self._outbox.put(
                key.stream,
                OutcomeEvent(
                    key.sequence_id, outcome, plan.num_rows, ended_s - forward_s, queue_s, sequence.num_cached, bubble_s
                ),
            )
            self._end_or_restart(key, sequence, outcome)
        self.counts.masks_over(plan)
        self.counts.pruning_over(result.num_pruned)
        self.counts.rounds_over(outcomes)
        self._unprepared = [share.sequence for share in shares if share.sequence.may_linger]
        self._scheduler.pass_over(shares, plan.num_rows, ended_s)
        self._report_load(len(shares), plan.num_rows, ended_s - forward_s, ended_s)

    def _finish_round(
        self, key: SequenceKey, sequence: RunningSequence, part: PassPart, ended_s: float, waited_s: float
    ) -> RoundOutcome | None:
        """A round's outcome; None for a part of a prompt, and for a sequence that cannot go on."""
        return self._alone(
            key, lambda: sequence.finish_round(part.logits, ended_s, waited_s, part.survivors, part.states)
        )

    def _end_or_restart(self, key: SequenceKey, sequence: RunningSequence, outcome: RoundOutcome) -> None:
        if outcome.finish is not None:
            self.counts.finished[outcome.finish.reason.value] += 1
            self._scheduler.remove(key)
        elif sequence.residence.is_outgrown:
            self._scheduler.restart(key)

    def _alone(self, key: SequenceKey, action: Callable[[], Result]) -> Result | None:
        """Do what concerns one sequence: where that fails, the sequence ends, and no other."""
        try:
            return action()
        except Exception as error:  # whatever it is, others go on
            # Trees are checked when they come: one that is wrong by now is no mistake of the client's.
            if isinstance(error, InvalidTreeError) or not isinstance(error, InvalidRequestError):
                logger.exception("sequence %d of stream %d cannot go on", key.sequence_id, key.stream)
                error = CoppiceError("the verifier failed")
            self._scheduler.remove(key)
            self._refuse(key, error)
            return None

    def _fail(self, keys: Sequence[SequenceKey]) -> None:
        """A pass over these sequences failed; all that run do where rows of their accepted paths may not have moved."""
        cache = self._target.cache
        if cache.has_unmade_moves:
            keys = self._scheduler.running_keys()
        for key in keys:
            sequence = self._scheduler.find(key)
            extra = of_request(sequence.request_id if sequence is not None else "")
            logger.error("sequence %d of stream %d failed with a pass", key.sequence_id, key.stream, extra=extra)
            self._scheduler.remove(key)
            self._refuse(key, CoppiceError("the forward pass failed"))
        if cache.has_unmade_moves:
            logger.error("rows may not have moved: all %d sequences failed, prompts are read anew", len(keys))
            cache.forget()

    def _report_load(self, batch_size: int, rows: int, pass_s: float, now_s: float) -> None:
        if now_s < self._next_load_s:
            return
        self._next_load_s = now_s + LOAD_INTERVAL_S
        waiting, running = self._scheduler.num_waiting, self._scheduler.num_running
        free_blocks = self._target.cache.num_free_blocks
        self._outbox.put_for_all(LoadEvent(batch_size, rows, pass_s, waiting, free_blocks, running))

    def _refuse(self, key: SequenceKey, error: CoppiceError) -> None:
        self.counts.sequence_failed(error)
        self._outbox.put(key.stream, ErrorEvent(key.sequence_id, error))

    def _deliver(self) -> None:
        self._outbox.deliver()
