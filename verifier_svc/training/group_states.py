"""Recurrent layers of a frozen target over one text, and then over groups that follow places of it.

A transformers forward has one state per text, and a group needs the state at its anchor. The layers of service keep
those: borders of the text's rows are the anchors, and each group is a sequence of its own that begins there. Its rows
are computed with gradients (`LinearRecurrence`, `CausalConvolution`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from transformers import PreTrainedModel

from coppice.training.block_layout import BlockLayout
from verifier_svc.engine.pass_plan import Segment
from verifier_svc.layers.recurrence import RecurrentStates, RowForest
from verifier_svc.layers.registry import install_layers, uninstall_layers

_NOTHING = np.empty(0, np.int64)


class GroupStates:
    """States at a layout's anchors, slot i + 1 for group i; without recurrent layers nothing happens."""

    def __init__(self, states: RecurrentStates | None, layout: BlockLayout) -> None:
        self._states = states
        self._anchors: list[int] = layout.anchors.tolist()
        self._length, self._num_masks = layout.length, layout.num_masks

    def begin_text(self) -> None:
        """Begin a forward of one text, whose states at anchors are kept."""
        if self._states is not None:
            self._states.allocate(1 + len(self._anchors))
            # One slot per place: groups after the same one share it.
            borders = tuple((anchor, 1 + self._anchors.index(anchor)) for anchor in sorted(set(self._anchors)))
            self._begin([_segment(0, self._length, 0, 0, borders)])

    def begin_groups(self) -> None:
        """Begin a forward of all groups, one after the other."""
        size = self._num_masks
        self._begin(
            [
                _segment(index * size, (index + 1) * size, anchor + 1, 1 + self._anchors.index(anchor))
                for index, anchor in enumerate(self._anchors)
            ]
        )

    def _begin(self, segments: list[Segment]) -> None:
        forest = RowForest(segments)
        for layer in () if self._states is None else self._states.layers:
            for recurrence in layer.recurrences:
                recurrence.begin(forest)


@contextmanager
def group_states(target: PreTrainedModel, layout: BlockLayout) -> Iterator[GroupStates]:
    """Let a target's recurrent layers compute rows of texts and groups meanwhile."""
    states = install_layers(target)
    try:
        yield GroupStates(states, layout)
    finally:
        uninstall_layers(target)


def _segment(start: int, stop: int, num_context: int, slot: int, borders: tuple[tuple[int, int], ...] = ()) -> Segment:
    return Segment(start, stop, num_context, stop - start, (), _NOTHING, _NOTHING, state=slot, borders=borders)
