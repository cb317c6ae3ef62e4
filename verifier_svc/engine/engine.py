"""The model thread: commands in, passes back to back, events out. The event loop never runs the model."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from coppice.obs.timeline import Timeline
from verifier_svc.engine.counts import EngineCounts
from verifier_svc.engine.open_sequences import Command, OpenSequences
from verifier_svc.engine.pass_plan import PassPlan
from verifier_svc.engine.pass_runner import PassPart, PassResult, PassRunner
from verifier_svc.engine.pass_shares import RowAllotment
from verifier_svc.engine.round_outcome import RoundOutcome
from verifier_svc.engine.scheduler import Scheduler, SchedulerLimits
from verifier_svc.engine.sequence import Draft, SequenceKey, SequenceSpec
from verifier_svc.extras.own_drafts import HeadThreads
from verifier_svc.model.target_model import TargetInfo, TargetModel
from verifier_svc.stream.events import LoadEvent, OutcomeEvent, PromptEvent
from verifier_svc.stream.outbox import Outbox, Sink
from verifier_svc.verify.token_choice import warm_up

logger = logging.getLogger(__name__)

LOAD_INTERVAL_S = 0.1


@dataclass(frozen=True, slots=True)
class FinishedPass:
    """A forward pass; start times of its planning, forward and acceptance; `bubble_s` precedes the forward."""

    batch: list[RowAllotment]
    plan: PassPlan
    result: PassResult
    started_s: float
    forward_s: float
    ended_s: float
    bubble_s: float

    @property
    def took_s(self) -> float:
        """Duration of the forward in seconds."""
        return self.ended_s - self.forward_s


class Engine:
    """Runs one target on its own thread. Public methods except `step` are thread-safe.

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
        counts: EngineCounts | None = None,
    ) -> None:
        """`timeline` records every pass; `counts` are for metrics, as are those of scheduler, cache and passes."""
        self._timeline = timeline
        self._target = target
        self._info = info
        self._clock = clock
        self.cache = target.cache
        self.counts = counts or EngineCounts()
        self.scheduler = Scheduler(target.cache, limits)
        self.passes = PassRunner(target, info.vocab_size, info.pruning)
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._outbox = Outbox()
        self._sequences = OpenSequences(
            self.scheduler, self._outbox, self.counts, info, max_nodes, clock, self._commands.put
        )
        self.grammars = self._sequences.grammars
        self._head_threads = HeadThreads(1 if info.head is None else info.head.num_threads)
        # Compiled here, so that no request waits.
        warm_up(info.vocab_size)
        self._next_load_s = 0.0
        self._stopping = False
        self._on_death: Callable[[], object] | None = None
        self._thread = threading.Thread(target=self._run, name="verifier-model", daemon=True)

    def start(self, on_death: Callable[[], object] | None = None) -> None:
        """Start the model thread; it calls `on_death` if it ends without `stop`."""
        self._on_death = on_death
        self._thread.start()

    def stop(self) -> None:
        """Stop after the current pass; waits for the thread."""
        self._commands.put(None)
        self._thread.join()
        self.grammars.close()

    def attach(self, stream: int, sink: Sink) -> None:
        """Deliver events of a stream's sequences to `sink` from now on."""
        self._commands.put(lambda: self._outbox.attach(stream, sink))

    def detach(self, stream: int) -> None:
        """Remove a stream and its sequences."""

        def detach() -> None:
            self._outbox.detach(stream)
            self._sequences.close_stream(stream)

        self._commands.put(detach)

    def open(self, key: SequenceKey, spec: SequenceSpec) -> None:
        """Queue a sequence; errors are events."""
        self._commands.put(lambda: self._sequences.open(key, spec))

    def submit(self, key: SequenceKey, draft: Draft) -> None:
        """Put a draft into a sequence's mailbox, if it is open; errors are events."""
        came_s = self._clock()
        self._commands.put(lambda: self._sequences.submit(key, draft, came_s))

    def close(self, key: SequenceKey) -> None:
        """Free a sequence; a no-op if it is unknown, since it may just have finished."""
        self._commands.put(lambda: self._sequences.close(key))

    def _run(self) -> None:
        try:
            while not self._stopping:
                self.step()
            self._deliver()
        except BaseException:  # any error ends the engine
            logger.exception("the model thread has ended")
            if self._on_death is not None:
                self._on_death()

    def step(self) -> None:
        """Execute pending commands; run and accept a pass if one may start; deliver events.

        Events of a pass are delivered at once if no other may start, else before the next forward: the event loop then
        sends them while the forward does not hold the GIL, and does not delay the pass's planning.
        """
        # Before waiting for commands, since finished sequences may have freed blocks, and again after them.
        self.scheduler.admit(self._clock())
        self._take_commands()
        self.scheduler.admit(self._clock())
        if self._may_start():
            started_s = self._clock()
            batch = self.scheduler.next_batch(started_s)
            finished = self._run_pass(batch, started_s) if batch else None
            if finished is not None:
                self._accept(finished)
        if not self._may_start():
            self._deliver()

    def _may_start(self) -> bool:
        """Whether a pass may start now."""
        start_s = self.scheduler.next_start_s()
        return start_s is not None and start_s <= self._clock()

    def _run_pass(self, batch: list[RowAllotment], started_s: float) -> FinishedPass | None:
        """One forward pass over the next rows of the batch; None if it failed, which fails its sequences.

        Delivers the last pass's events before the forward.
        """
        try:
            work = [share.sequence.next_rows(share.num_pending, share.max_nodes, share.max_masks) for share in batch]
            plan = self._target.plan(work)
            self._deliver()
            forward_s = self._clock()
            result = self.passes.run(plan, work)
        except Exception:  # out of memory, a failed kernel: fails these sequences only
            logger.exception("a pass over %d sequences failed", len(batch))
            self.counts.pass_failed()
            self._fail([share.key for share in batch])
            return None
        ended_s = self._clock()
        bubble_s = self.counts.pass_over(plan.num_rows, forward_s, ended_s)
        if self._timeline is not None:
            ids = [share.key.sequence_id for share in batch]
            self._timeline.took("pass", forward_s, ended_s, size=plan.num_rows, sequences=ids)
        return FinishedPass(batch, plan, result, started_s, forward_s, ended_s, bubble_s)

    def _accept(self, finished: FinishedPass) -> None:
        """End the round of every sequence of a pass."""
        batch = finished.batch
        ended = [
            (share, self._end_round(share, part, finished))
            for share, part in zip(batch, finished.result.parts, strict=True)
        ]
        going_on = (share.sequence for share, outcome in ended if outcome is not None and outcome.finish is None)
        begun = [sequence.begin_draft(len(batch)) for sequence in going_on]
        self._head_threads.ask([own for own in begun if own is not None], len(batch))
        outcomes = [self._report(share, outcome, finished) for share, outcome in ended]
        self.counts.rounds_over(finished.plan, finished.result.num_pruned, [one for one in outcomes if one is not None])
        if all(share.num_pending == 1 for share in batch):
            for own in (self._info.lookup, self._info.head):
                if own is not None:
                    own.cost.add(finished.plan.num_rows, finished.took_s)
        self.scheduler.pass_over(batch, finished.plan.num_rows, finished.ended_s)
        self._report_load(finished)

    def _end_round(self, share: RowAllotment, part: PassPart, finished: FinishedPass) -> RoundOutcome | None:
        """Outcome of a round; None for part of a prompt, and for a failed sequence."""
        sequence, ended_s = share.sequence, finished.ended_s
        waited_s = finished.started_s - sequence.last_outcome_s if sequence.may_linger else 0.0
        return self._sequences.alone(share.key, lambda: sequence.finish_round(part, ended_s, waited_s))

    def _report(self, share: RowAllotment, outcome: RoundOutcome | None, finished: FinishedPass) -> RoundOutcome | None:
        """Send an outcome with the target's own draft for the next round; returns it."""
        key, sequence = share.key, share.sequence
        if outcome is None:
            self._show_prompt(share)
            return None
        if (draft := self._sequences.alone(key, sequence.take_draft)) is None:
            return None
        outcome = replace(outcome, redraft=draft) if len(draft) else outcome
        event = OutcomeEvent(
            key.sequence_id,
            outcome,
            finished.plan.num_rows,
            finished.took_s,
            sequence.started_s - sequence.opened_s,
            sequence.num_cached,
            finished.bubble_s,
        )
        self._outbox.put(key.stream, event)
        if outcome.finish is not None:
            self._sequences.finish(key, outcome.finish.reason.value)
            return outcome
        # After the first token, which does not wait for it.
        self._show_prompt(share)
        if sequence.residence.is_outgrown:
            self.scheduler.restart(key)
        return outcome

    def _show_prompt(self, share: RowAllotment) -> None:
        """Send the states of the part of a prompt that the pass has read, if they are wanted."""
        if (states := share.sequence.take_prompt_states()) is not None:
            self._outbox.put(share.key.stream, PromptEvent(share.key.sequence_id, states))

    def _take_commands(self) -> None:
        """Execute pending commands; wait for more while no pass may start."""
        start_s = self.scheduler.next_start_s()
        if start_s is None:
            self.counts.nothing_runs()
        timeout = None if start_s is None else start_s - self._clock()
        try:
            if timeout is None or timeout > 0:
                self._deliver()
                self._carry_out(self._commands.get(timeout=timeout))
            while True:
                self._carry_out(self._commands.get_nowait())
        except queue.Empty:
            pass

    def _carry_out(self, command: Command | None) -> None:
        if command is None:
            self._stopping = True
        else:
            command()

    def _fail(self, keys: Sequence[SequenceKey]) -> None:
        """Fail these sequences after a failed pass; all running ones if moves of accepted rows may be incomplete."""
        if self.cache.has_unmade_moves:
            keys = self.scheduler.running_keys()
        for key in keys:
            self._sequences.fail_with_pass(key)
        if self.cache.has_unmade_moves:
            logger.error(
                "KV cache moves may be incomplete: all %d sequences failed and the prefix cache is cleared", len(keys)
            )
            self.cache.forget()

    def _report_load(self, finished: FinishedPass) -> None:
        if finished.ended_s < self._next_load_s:
            return
        self._next_load_s = finished.ended_s + LOAD_INTERVAL_S
        event = LoadEvent(
            batch_size=len(finished.batch),
            rows=finished.plan.num_rows,
            pass_s=finished.took_s,
            queued_sequences=self.scheduler.num_waiting,
            free_kv_blocks=self.cache.num_open_blocks,
            running_sequences=self.scheduler.num_running,
        )
        self._outbox.put_for_all(event)

    def _deliver(self) -> None:
        self._outbox.deliver()
