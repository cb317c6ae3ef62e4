"""Recurrences with a matrix as state: the gated delta rule and Mamba's, see `kernels/cpu/linear_recurrences.py`.

On CPUs they are compiled here, on GPUs they run in Triton (`triton_recurrence.py`).

A pass leaves the state after each segment's pending tokens, and the inputs of its rows; a commit replays the accepted
nodes from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from coppice.core.errors import IncompatibleError
from verifier_svc.kernels.cpu.linear_recurrences import RowInputs, TreeRows, advance_path, advance_tree
from verifier_svc.kernels.cpu.shared_work import SharedThreads, new_counters
from verifier_svc.layers.recurrence import RowForest, StateCommit

if TYPE_CHECKING:
    from verifier_svc.layers.triton_recurrence import TritonRecurrence

# Numbers of states read or written per pass above which several threads pay, about a millisecond.
_WORTH_THREADS = 2**21


def linear_recurrence(
    device: torch.device, num_heads: int, key_size: int, value_size: int, *, corrects: bool, rates: Tensor | None = None
) -> LinearRecurrence | TritonRecurrence:
    """The recurrence on a device, with arguments as of `LinearRecurrence`.

    Raises:
        IncompatibleError: there is no Triton for the device.
    """
    if is_compiled_on(device):
        return LinearRecurrence(num_heads, key_size, value_size, corrects=corrects, rates=rates)
    try:
        # Imported here: Triton is optional.
        from verifier_svc.layers.triton_recurrence import TritonRecurrence
    except ImportError as error:
        raise IncompatibleError(f"recurrent layers need Triton on a GPU, or DEVICE=cpu: {error}") from error
    return TritonRecurrence(device, num_heads, key_size, value_size, corrects=corrects, rates=rates)


def is_compiled_on(device: torch.device) -> bool:
    """Whether recurrences on a device are compiled loops."""
    return device.type == "cpu"


class LinearRecurrence:
    """States [heads, key size, value size] of one layer; with `corrects` by the delta rule.

    With `rates` [heads, key size, value size] an entry decays by exp(-rate * step).
    """

    def __init__(
        self, num_heads: int, key_size: int, value_size: int, *, corrects: bool, rates: Tensor | None = None
    ) -> None:
        self._shape = num_heads, key_size, value_size
        self._corrects = corrects
        self._rates = np.empty((0, key_size, value_size), np.float32) if rates is None else rates.contiguous().numpy()
        self._states = self._after = np.empty((0, *self._shape), np.float32)
        self._inputs: RowInputs | None = None
        self._coming = self.forest = RowForest(())
        self._threads = SharedThreads()

    @property
    def bytes_per_state(self) -> int:
        """Bytes of the matrices of all heads."""
        return int(np.prod(self._shape)) * self._states.itemsize

    def allocate(self, num_slots: int) -> None:
        """Allocate states."""
        self._states = np.zeros((num_slots, *self._shape), np.float32)

    def copy(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy states."""
        self._states[destinations.numpy()] = self._states[sources.numpy()]

    def commit(self, commits: Sequence[StateCommit]) -> None:
        """Replay accepted nodes after their segment's pending tokens."""
        forest, paths = self.forest, []
        for commit in commits:
            paths.append(commit.rows[forest.num_pending[commit.segment] :])
        arrays = (
            np.array([row for path in paths for row in path], np.int64),
            np.cumsum([0, *map(len, paths)]),
            np.array([commit.slot for commit in commits], np.int64),
            np.array([commit.segment for commit in commits], np.int64),
        )
        num_states = sum(map(len, paths)) + len(commits)
        self._call(num_states, advance_path, self._inputs, *arrays, self._states, self._after)

    def begin(self, forest: RowForest) -> None:
        """Begin a pass, or its part after pruning."""
        self._coming = forest

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor, decays: Tensor, steps: Tensor) -> Tensor:
        """Outputs [N, heads, value size] of a pass, zero for padding.

        `queries` and `keys` [N, groups, key size], `values` [N, heads, value size]; `decays` [N, heads, 1 or key size]
        and `steps` [N, heads, 1] or, with rates, which give the decays, [N, heads, value size].
        """
        forest = self.forest = self._coming
        # In training products may have been rounded to half precision.
        parts = [part.float() for part in (queries, keys, values, decays, steps)]
        if values.requires_grad:
            return self._by_tensors(*parts)
        query, key, value, decay, step = (tensor.contiguous().numpy() for tensor in parts)
        self._inputs = RowInputs(query, key, value, decay, step, self._rates, self._corrects)
        border_of_row = np.full(forest.num_rows, -1, np.int64)
        border_of_row[forest.border_rows] = forest.border_slots
        rows = TreeRows(forest.starts, forest.num_pending, forest.slots, forest.parents, border_of_row)
        self._after = np.empty((len(forest.num_pending), *self._shape), np.float32)
        output = torch.zeros(values.shape)
        self._call(forest.num_rows, advance_tree, self._inputs, rows, self._states, self._after, output.numpy())
        return output

    def _by_tensors(self, queries: Tensor, keys: Tensor, values: Tensor, decays: Tensor, steps: Tensor) -> Tensor:
        """As `__call__`, with gradients, for training: segments are chains of one length, and nothing is committed."""
        forest, heads = self.forest, self._shape[0]
        queries, keys = (part.repeat_interleave(heads // part.shape[1], 1) for part in (queries, keys))
        state = torch.from_numpy(self._states[forest.slots])
        outputs = []
        for place in range(int(forest.num_pending[0])):
            rows = forest.starts[:-1] + place
            # [segments, heads, keys or 1, values or 1].
            query, key = (part[rows][..., None] for part in (queries, keys))
            value, step = (part[rows][:, :, None] for part in (values, steps))
            if len(self._rates):
                state = state * torch.exp(-torch.from_numpy(self._rates) * step)
            else:
                state = state * decays[rows][..., None]
            if self._corrects:
                value = value - (state * key).sum(-2, keepdim=True)
            state = state + key * (value * step)
            outputs.append((state * query).sum(-2))
        return torch.stack(outputs, 1).flatten(0, 1)

    def _call(self, num_states: int, function: object, *arguments: object) -> None:
        is_much = num_states * np.prod(self._shape) >= _WORTH_THREADS
        num_threads = torch.get_num_threads() if is_much else 1
        self._threads.call(function, num_threads, *arguments, new_counters(1), 0)  # type: ignore[arg-type]
