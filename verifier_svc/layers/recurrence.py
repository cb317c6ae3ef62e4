"""Interface of layers with a recurrent state: what a pass is to them, what they keep, and when states change.

A recurrence is a function of a row, its input and the state before it, with the state after it as a result. Over a
token tree the state before a node is that after its parent, and the state before a pending token is that after the one
before. States are never changed by a pass; a recurrence keeps what it needs to compute those of accepted rows, and
does so before the next pass (`commit`). So a rejected node leaves nothing, and a pass can be repeated.

Strict rule: the operations of a row, and their order, are the same in every pass, whatever the other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from verifier_svc.engine.kv_cache import IntArray
from verifier_svc.engine.pass_plan import PassPlan, Segment
from verifier_svc.engine.state_slots import StateMoves

T = TypeVar("T")

# Parent of a segment's first row.
NO_ROW = -1


@dataclass(frozen=True, slots=True)
class StateCommit:
    """Rows of the last pass, as indices of the pass in path order, over which a slot's states advance."""

    segment: int
    slot: int
    rows: tuple[int, ...]


class RowForest:
    """Rows of a pass, one tree per segment: its pending tokens are a chain, its nodes hang below.

    Segment s has rows from `starts[s]` to `starts[s + 1]` (excluded), of which the first `num_pending[s]` are pending.
    Its states are in slot `slots[s]`, and zero if `slots[s]` is -1. `parents` [rows] are rows of the pass, NO_ROW for
    each segment's first. After `border_rows` the states are kept in `border_slots`. Of a pruned pass these are the
    remaining rows.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        """Rows of these segments, which are those of a pass in order."""
        self.starts: IntArray = np.array([0, *(segment.stop for segment in segments)], np.int64)
        self.num_pending: IntArray = np.array([segment.num_pending for segment in segments], np.int64)
        slots = [segment.state if segment.num_context else -1 for segment in segments]
        self.slots: IntArray = np.array(slots, np.int64)
        parents: list[int] = []
        for segment in segments:
            last = segment.start + segment.num_pending - 1
            parents += [NO_ROW, *range(segment.start, last)]
            parents += [last if parent < 0 else last + 1 + parent for parent in segment.parents]
        self.parents: IntArray = np.array(parents, np.int64)
        borders = [(segment.start + row, slot) for segment in segments for row, slot in segment.borders]
        self.border_rows: IntArray = np.array([row for row, _ in borders], np.int64)
        self.border_slots: IntArray = np.array([slot for _, slot in borders], np.int64)
        self._segments = {segment.state: place for place, segment in enumerate(segments)}
        # Rows within their segments by their indices before pruning, for segments without some.
        self._remaining = {
            place: {int(old): new for new, old in enumerate(segment.places)}
            for place, segment in enumerate(segments)
            if segment.places is not None
        }
        self._made: dict[Hashable, Any] = {}

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """The result of `make`, called once for all layers that give the same key."""
        if key not in self._made:
            self._made[key] = make()
        made: T = self._made[key]
        return made

    @property
    def num_rows(self) -> int:
        """Rows without padding."""
        return len(self.parents)

    @cached_property
    def segment_of_row(self) -> IntArray:
        """Segment of every row [rows]."""
        return np.repeat(np.arange(len(self.num_pending)), np.diff(self.starts))

    def commits_of(self, moves: StateMoves) -> list[StateCommit]:
        """Rows of this pass over which slots advance; those of `moves` are counted before pruning.

        Raises:
            RuntimeError: a sequence keeps rows of another pass, or pruned ones.
        """
        commits = []
        for slot, rows in moves.commits.items():
            place = self._segments.get(slot)
            if place is None or rows[: self.num_pending[place]] != tuple(range(self.num_pending[place])):
                raise RuntimeError("rows that are kept are not those of the last pass")
            start, remaining = int(self.starts[place]), self._remaining.get(place)
            if remaining is not None:
                if not remaining.keys() >= set(rows):
                    raise RuntimeError("rows that are kept were pruned")
                rows = tuple([remaining[row] for row in rows])
            commits.append(StateCommit(place, slot, tuple([start + row for row in rows])))
        return commits


class Recurrence(Protocol):
    """One recurrence of one layer: its states by slot, and its inputs in the last pass."""

    @property
    def forest(self) -> RowForest:
        """Rows of its last call."""
        ...

    @property
    def bytes_per_state(self) -> int:
        """Bytes of the state of one sequence."""
        ...

    def allocate(self, num_slots: int) -> None:
        """Allocate states, dropping contents."""
        ...

    def copy(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy states from slots to other slots."""
        ...

    def commit(self, commits: Sequence[StateCommit]) -> None:
        """Advance slots over rows of the last call, by the operations of the pass."""
        ...

    def begin(self, forest: RowForest) -> None:
        """Begin a pass, or its part after pruning: the next call of the layer has these rows."""
        ...


class RecurrentLayer(Protocol):
    """A layer's computation over the rows of a pass, in place of its module's own.

    Constructed from the module, which it reads its weights from. `forward` takes the module's input [1, N, hidden] and
    whatever else the model hands to it, and returns [1, N, hidden]; rows of padding are finite.
    """

    # For people, and names of the classes of modules that are such a layer.
    kind: ClassVar[str]
    modules: ClassVar[frozenset[str]]

    def __init__(self, module: nn.Module) -> None: ...

    @property
    def recurrences(self) -> Sequence[Recurrence]:
        """The layer's recurrences."""
        ...

    def forward(self, hidden_states: Tensor, *arguments: object, **named: object) -> Tensor:
        """Compute the layer."""
        ...


class RecurrentStates:
    """States of all recurrent layers of a model."""

    def __init__(self, layers: Sequence[RecurrentLayer]) -> None:
        self.layers = tuple(layers)
        self._recurrences = [recurrence for layer in layers for recurrence in layer.recurrences]

    @property
    def bytes_per_state(self) -> int:
        """Bytes of the states of one sequence."""
        return sum(recurrence.bytes_per_state for recurrence in self._recurrences)

    def allocate(self, num_slots: int) -> None:
        """Allocate slots, dropping contents."""
        for recurrence in self._recurrences:
            recurrence.allocate(num_slots)

    def begin(self, plan: PassPlan, moves: StateMoves) -> None:
        """Change slots as told, and begin a pass."""
        if moves.commits:
            # Two in a pruned pass: recurrences before and after the early head.
            forests = {recurrence.forest for recurrence in self._recurrences}
            commits = {forest: forest.commits_of(moves) for forest in forests}
            for recurrence in self._recurrences:
                recurrence.commit(commits[recurrence.forest])
        if moves.copies:
            sources, destinations = torch.tensor(moves.copies).unbind(1)
            for recurrence in self._recurrences:
                recurrence.copy(sources, destinations)
        self.narrow(plan)

    def narrow(self, plan: PassPlan) -> None:
        """From the next layer on, restrict the pass to this plan's rows."""
        forest = RowForest(plan.segments)
        for recurrence in self._recurrences:
            recurrence.begin(forest)
