"""A modelled verifier: when passes start, who takes part, how long they take. Rows are shared by its own rule."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from coppice.lab.simulator.machine import Machine, PassWork, noise_factor
from coppice.lab.simulator.orchestrators import Clock
from coppice.lab.simulator.sequences import SimulatedSequence
from orchestrator.request.rounds import Outcome, VerifierLoad
from verifier_svc.engine.pass_cost import PassCost
from verifier_svc.engine.pass_shares import RowAllotment, share_rows

# As in `verifier_svc/engine/engine.py`, which needs torch.
LOAD_INTERVAL_S = 0.1
# Readings of the clock that are this close are one.
_TOGETHER_S = 1e-9


@dataclass
class Counts:
    """What passes and drafters came to so far.

    `row_passes`: over all rounds, rows of their pass; `drafted`: rounds with nodes.
    """

    passes: int = 0
    rows: int = 0
    rounds: int = 0
    row_passes: int = 0
    tokens: int = 0
    nodes: int = 0
    drafted: int = 0
    pass_s: float = 0.0
    drafts: int = 0
    drafting_s: float = 0.0


class SimulatedVerifier:
    """Runs passes back to back over its sequences, like `verifier_svc/engine/scheduler.py`.

    A pass starts when every running sequence has its draft, or at the first deadline without those that still wait.

    The KV cache is taken to be large enough. `drafted_s` tells how long drafters on its machine have been busy so far,
    and `on_pace` is called when the model begins to compute and when it has.
    """

    def __init__(
        self,
        clock: Clock,
        machine: Machine,
        seed: int,
        drafted_s: Callable[[], float] = lambda: 0.0,
        on_pace: Callable[[], None] = lambda: None,
    ) -> None:
        self._clock = clock
        self._machine = machine
        self._costs = machine.verifier
        self._random = random.Random(seed)
        self._drafted_s = drafted_s
        self._on_pace = on_pace
        self._waiting: deque[SimulatedSequence] = deque()
        self._running: list[SimulatedSequence] = []
        self._in_pass: list[tuple[RowAllotment, SimulatedSequence, float]] = []
        self._own_cost = PassCost()
        # When the last pass ended, and from when on the next could have run.
        self._ended_s = self._free_s = 0.0
        self._next_load_s = 0.0
        self.is_computing = False
        self.load = VerifierLoad()
        self.counts = Counts()
        # By number of the pass: how much slower than usual it is.
        self.slow_passes: dict[int, float] = {}

    @property
    def num_sequences(self) -> int:
        return len(self._running) + len(self._waiting)

    def open(self, sequence: SimulatedSequence) -> None:
        sequence.last_outcome_s = self._clock.now_s
        self._waiting.append(sequence)
        self.look()

    def close(self, sequence: SimulatedSequence) -> None:
        """Free a sequence, unless it has ended."""
        for sequences in (self._running, self._waiting):
            if sequence in sequences:
                sequences.remove(sequence)
        self.look()

    def look(self) -> None:
        """Start a pass if one may start. What asked for it comes before it, as commands come before a pass."""
        self._clock.later(0.0, self._step)

    def _step(self) -> None:
        if self._in_pass:
            return
        while self._waiting and len(self._running) < self._costs.max_sequences:
            sequence = self._waiting.popleft()
            sequence.last_outcome_s = self._clock.now_s
            self._running.append(sequence)
        if not self._running:
            return
        now_s = self._clock.now_s
        start_s = min(sequence.deadline_s for sequence in self._running)
        if start_s <= now_s + _TOGETHER_S or all(sequence.has_draft for sequence in self._running):
            self._run_pass()
        else:
            self._clock.later(start_s - now_s, self._step)

    def _run_pass(self) -> None:
        now_s = self._clock.now_s
        waited = sorted(self._running, key=lambda sequence: sequence.last_outcome_s)
        ready = [one for one in waited if one.has_draft or one.deadline_s <= now_s + _TOGETHER_S]
        costs = self._costs
        self._free_s = max(self._ended_s, waited[0].last_outcome_s)
        shares = share_rows(
            # The rule looks at nothing that these sequences lack.
            cast("Any", list(enumerate(ready))),
            prefill_chunk=costs.prefill_chunk,
            max_rows=costs.max_rows,
            own_rows=self._own_cost.own_rows,
        )
        work = PassWork(0, 0, 0, 0)
        for share in shares:
            sequence = cast(SimulatedSequence, share.sequence)
            waited_s = now_s - sequence.last_outcome_s if sequence.may_linger else 0.0
            self._in_pass.append((share, sequence, waited_s))
            work = _with_rows(work, sequence, sequence.begin_pass(share.num_pending, share.max_nodes))
        self._clock.later(costs.before_s(len(shares)), lambda: self._compute(work))

    def _compute(self, work: PassWork) -> None:
        slow = noise_factor(self._random.gauss(0, 1), self._machine.noise)
        alone_s = self._costs.pass_s(work) * slow * self.slow_passes.get(self.counts.passes, 1.0)
        self.is_computing = True
        self._on_pace()
        began_s, drafted_s = self._clock.now_s, self._drafted_s()

        def look() -> None:
            """End the pass, unless drafters have taken more from it than it was made longer for."""
            beside_s = self._drafted_s() - drafted_s
            left_s = began_s + alone_s + self._machine.contention.pass_per_draft * beside_s - self._clock.now_s
            if left_s > _TOGETHER_S:
                self._clock.later(left_s, look)
            else:
                self._end_pass(work, self._clock.now_s - began_s)

        self._clock.later(alone_s, look)

    def _end_pass(self, work: PassWork, pass_s: float) -> None:
        self.is_computing = False
        self._on_pace()
        if len(self._in_pass) > 1:
            self._own_cost.add(work.rows, self._clock.now_s - self._free_s)
        self._ended_s = self._clock.now_s
        self.counts.passes += 1
        self.counts.rows += work.rows
        self.counts.pass_s += pass_s
        outcomes = []
        for share, sequence, waited_s in self._in_pass:
            outcome = sequence.end_pass(share.num_pending, self._clock.now_s, waited_s, work.rows, pass_s)
            if outcome is not None and sequence in self._running:
                outcomes.append((sequence, outcome))
        self._take_turns()
        self._tell_load(work, pass_s)
        num_tokens = sum(len(outcome.token_ids) for _, outcome in outcomes)
        self._clock.later(self._costs.after_s(len(self._in_pass), num_tokens), lambda: self._deliver(outcomes))

    def _deliver(self, outcomes: list[tuple[SimulatedSequence, Outcome]]) -> None:
        self._in_pass = []
        for sequence, outcome in outcomes:
            if sequence not in self._running:
                continue
            self._count(outcome)
            if sequence.is_complete:
                self._running.remove(sequence)
            sequence.on_round(outcome)
        self.look()

    def _count(self, outcome: Outcome) -> None:
        self.counts.rounds += 1
        self.counts.row_passes += outcome.pass_rows
        self.counts.tokens += len(outcome.token_ids)
        self.counts.nodes += outcome.draft_nodes
        self.counts.drafted += outcome.draft_nodes > 0

    def _take_turns(self) -> None:
        """Put the rounds of a pass after all others, as the scheduler does where not all find room."""
        took_part = {id(sequence) for _, sequence, _ in self._in_pass if not sequence.is_prefilling}
        self._running.sort(key=lambda sequence: id(sequence) in took_part)

    def _tell_load(self, work: PassWork, pass_s: float) -> None:
        if self._clock.now_s >= self._next_load_s:
            self._next_load_s = self._clock.now_s + LOAD_INTERVAL_S
            self.load = VerifierLoad(len(self._in_pass), work.rows, round(1e6 * pass_s), len(self._waiting))


def _with_rows(work: PassWork, sequence: SimulatedSequence, rows: int) -> PassWork:
    if sequence.is_prefilling:
        return PassWork(work.num_rounds, work.round_rows, work.prompt_rows + rows, work.context_rows)
    return PassWork(
        work.num_rounds + 1,
        work.round_rows + rows,
        work.prompt_rows,
        work.context_rows + rows * len(sequence.tokens),
    )
