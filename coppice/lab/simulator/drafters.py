"""A modelled drafter, and the link to it that a request's drafting takes for a drafter client."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coppice.core.tree import EMPTY_TREE, TokenTree
from coppice.lab.simulator.orchestrators import Action, SimulatedOrchestrator
from coppice.lab.simulator.profile import Text
from coppice.lab.simulator.sequences import num_followed
from orchestrator.request.drafting import Drafting
from orchestrator.request.rounds import Outcome

KIND = "modelled"


@dataclass
class DraftedSequence:
    """A sequence at a drafter. `last` is its last tree and `num_read` the tokens before it: both need no reading."""

    text: Text
    handler: Drafting
    num_prompt: int
    length: int
    max_nodes: int
    row_multiple: int
    num_read: int = 0
    last: TokenTree = EMPTY_TREE
    is_closed: bool = False
    is_queued: bool = False


class SimulatedDrafter:
    """Serves sequences one after another, each for its newest state, as `drafter_svc/model/model_thread.py` does."""

    def __init__(
        self,
        orchestrator: SimulatedOrchestrator,
        is_beside_a_pass: Callable[[], bool] = lambda: False,
    ) -> None:
        self._clock, self._machine = orchestrator.clock, orchestrator.machine
        self._orchestrator = orchestrator
        self._is_beside_a_pass = is_beside_a_pass
        self._jobs: deque[DraftedSequence] = deque()
        # What it drafts now, the work of that at full speed, since when at which share of it, and which estimate of its
        # end holds.
        self._current: tuple[DraftedSequence, int, TokenTree] | None = None
        self._left_s = self._since_s = 0.0
        self._speed = 1.0
        self._estimate = 0
        self.num_sequences = 0
        self.busy_s = 0.0
        self.num_drafts = 0

    @property
    def drafted_s(self) -> float:
        """For how long it has been busy so far."""
        return self.busy_s + (self._clock.now_s - self._since_s if self._current is not None else 0.0)

    def queue(self, sequence: DraftedSequence) -> None:
        """Draft for a sequence when its turn comes."""
        if not sequence.is_queued and sequence.max_nodes > 0:
            sequence.is_queued = True
            self._jobs.append(sequence)
        self._next()

    def _next(self) -> None:
        while self._jobs and self._current is None:
            sequence = self._jobs.popleft()
            sequence.is_queued = False
            if not sequence.is_closed and sequence.max_nodes:
                self._draft(sequence)

    def _draft(self, sequence: DraftedSequence) -> None:
        base, position = sequence.length, sequence.length - sequence.num_prompt
        tree = sequence.text.draft(position, sequence.max_nodes, sequence.row_multiple)
        self._left_s = self._machine.drafter.draft_s(len(tree), _num_unread(sequence))
        sequence.num_read, sequence.last = base, tree
        self._current = (sequence, base, tree)
        self._go_on()

    def pace_changed(self) -> None:
        """A pass on its machine has begun or ended."""
        if self._current is not None:
            self._work()
            self._go_on()

    def _go_on(self) -> None:
        """Work from now on at the speed that a pass leaves."""
        self._since_s = self._clock.now_s
        self._speed = 1 / self._machine.contention.draft_factor if self._is_beside_a_pass() else 1.0
        self._estimate += 1
        number = self._estimate
        self._clock.later(self._left_s / self._speed, lambda: self._drafted(number))

    def _work(self) -> None:
        """Take off what was done since the speed last changed."""
        elapsed_s = self._clock.now_s - self._since_s
        self.busy_s += elapsed_s
        self._left_s = max(0.0, self._left_s - self._speed * elapsed_s)

    def _drafted(self, number: int) -> None:
        if number != self._estimate or self._current is None:
            return
        self._work()
        (sequence, base, tree), self._current, self._left_s = self._current, None, 0.0
        self.num_drafts += 1
        self._deliver_later(sequence, base, tree)
        self._next()

    def _deliver_later(self, sequence: DraftedSequence, base: int, tree: TokenTree) -> None:
        def arrive() -> None:
            self._orchestrator.handle(self._machine.orchestrator.tree_s, lambda: _deliver(sequence, base, tree))

        self._clock.later(self._machine.message_s, arrive)


def _num_unread(sequence: DraftedSequence) -> int:
    """Tokens after what the drafter has read, and after what it has read as a part of its last tree."""
    start = max(0, sequence.num_read - sequence.num_prompt)
    if sequence.num_read == 0:
        return sequence.length
    followed = num_followed(sequence.last, sequence.text.said(start, sequence.length - sequence.num_prompt))
    return sequence.length - sequence.num_read - followed


def _deliver(sequence: DraftedSequence, base: int, tree: TokenTree) -> None:
    if not sequence.is_closed:
        sequence.handler.on_tree(KIND, base, (), tree)


class DrafterLink:
    """One request's way to its drafter: as much of `orchestrator/peers/drafter_client.py` as drafting uses."""

    connected = True
    needs_features = False
    drafts_ahead = False
    kind = KIND

    def __init__(
        self, orchestrator: SimulatedOrchestrator, drafter: SimulatedDrafter, text: Text, num_prompt: int
    ) -> None:
        self._clock = orchestrator.clock
        self._message_s = orchestrator.machine.message_s
        self._ask_s = orchestrator.machine.orchestrator.ask_s
        self._orchestrator = orchestrator
        self._drafter = drafter
        self._text = text
        self._num_prompt = num_prompt
        self._ids = itertools.count(1)
        self._sequences: dict[int, DraftedSequence] = {}
        self.asked = 0

    def join(self, handler: Drafting) -> int:
        sequence_id, opening = next(self._ids), handler.draft_opening()
        sequence = DraftedSequence(
            self._text, handler, self._num_prompt, len(opening.token_ids), opening.max_nodes, opening.row_multiple
        )
        self._sequences[sequence_id] = sequence
        self._drafter.num_sequences += 1
        self.asked += 1
        self._send(lambda: self._drafter.queue(sequence))
        return sequence_id

    def follows(self, sequence_id: int) -> bool:
        return sequence_id in self._sequences

    def outcome(
        self, sequence_id: int, outcome: Outcome, max_nodes: int | None = None, row_multiple: int | None = None
    ) -> None:
        self.asked += 1
        committed = outcome.base_length + len(outcome.token_ids)

        def arrive() -> None:
            sequence = self._sequences.get(sequence_id)
            if sequence is None:
                return
            sequence.length = committed
            if max_nodes is not None:
                sequence.max_nodes = max_nodes
            if row_multiple is not None:
                sequence.row_multiple = row_multiple
            self._drafter.queue(sequence)

        self._send(arrive)

    def leave(self, sequence_id: int) -> None:
        sequence = self._sequences.pop(sequence_id, None)
        if sequence is not None:
            sequence.is_closed = True
            self._drafter.num_sequences -= 1

    def _send(self, arrive: Action) -> None:
        self._clock.later(self._orchestrator.spend(self._ask_s) + self._message_s, arrive)


def least_busy(drafters: Sequence[SimulatedDrafter]) -> SimulatedDrafter:
    """The one with the fewest sequences; among equals the first."""
    return min(drafters, key=lambda drafter: drafter.num_sequences)
