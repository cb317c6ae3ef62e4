"""Short causal convolutions: a row's output is a weighted sum of its own input and its nearest ancestors'.

The state of a sequence is its last inputs. A row's products are added one after the other, the oldest first, each
rounded, so that its bits do not depend on other rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from verifier_svc.engine.kv_cache import IntArray
from verifier_svc.kernels.cpu.convolutions import convolve
from verifier_svc.kernels.cpu.shared_work import SharedThreads, new_counters
from verifier_svc.layers.recurrence import NO_ROW, RowForest, StateCommit

# Products of a pass above which several threads pay, about a millisecond.
_WORTH_THREADS = 2**21
_NO_BIASES = np.empty(0, np.float32)


class CausalConvolution:
    """Depthwise convolution with weights [channels, 1, width] and biases [channels] or None."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        # Oldest input first [width, channels].
        self._weights = weight.detach()[:, 0].t().contiguous()
        self._biases = _NO_BIASES if bias is None else bias.detach().numpy()
        self._num_inputs, self._channels = self._weights.shape[0] - 1, self._weights.shape[1]
        self._states = torch.empty(0)
        self._coming = self.forest = RowForest(())
        self._windows: IntArray = np.empty((0, self._num_inputs + 1), np.int64)
        # Inputs of the last pass's rows, and each segment's last ones before it [segments * (width - 1), channels].
        self._inputs = self._before = torch.empty(0)
        self._threads = SharedThreads()

    @property
    def bytes_per_state(self) -> int:
        """Bytes of the last inputs."""
        return self._num_inputs * self._channels * self._weights.element_size()

    def allocate(self, num_slots: int) -> None:
        """Allocate states [slots, width - 1, channels]."""
        self._states = self._weights.new_zeros(num_slots, self._num_inputs, self._channels)

    def copy(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy states."""
        self._states[destinations] = self._states[sources]

    def commit(self, commits: Sequence[StateCommit]) -> None:
        """Keep the inputs of every path's last rows."""
        rows, slots = ([commit.rows[-1] for commit in commits], [commit.slot for commit in commits])
        self._keep(rows, torch.tensor(slots))

    def begin(self, forest: RowForest) -> None:
        """Begin a pass, or its part after pruning."""
        self._coming = forest

    def __call__(self, inputs: Tensor) -> Tensor:
        """`inputs` [N, channels] of a pass, padding included, to outputs likewise."""
        forest = self.forest = self._coming
        self._windows = windows(forest, self._num_inputs + 1)
        known = torch.from_numpy(forest.slots)
        before = torch.where((known >= 0)[:, None, None], self._states[known.clamp(min=0)], 0.0)
        self._inputs, self._before = inputs.contiguous(), before.flatten(0, 1)
        output = torch.empty_like(self._inputs)
        output[forest.num_rows :] = 0
        arrays = self._inputs.numpy(), self._before.numpy(), self._windows, self._weights.numpy(), self._biases
        is_much = forest.num_rows * self._weights.numel() >= _WORTH_THREADS
        num_threads = torch.get_num_threads() if is_much else 1
        self._threads.call(convolve, num_threads, *arrays, output.numpy()[: forest.num_rows], new_counters(1))
        if len(forest.border_rows):
            self._keep(forest.border_rows, torch.from_numpy(forest.border_slots))
        return output

    def _keep(self, rows: Sequence[int] | IntArray, slots: Tensor) -> None:
        """Write the last inputs up to these rows to slots."""
        places = torch.from_numpy(self._windows[rows, 1:])
        num_rows = self.forest.num_rows
        last = self._before[(places - num_rows).clamp(min=0)]
        is_row = places < num_rows
        last[is_row] = self._inputs[places[is_row]]
        self._states[slots] = last


def windows(forest: RowForest, width: int) -> IntArray:
    """Places of every row's input and its nearest ancestors', oldest first [rows, width].

    Rows come first, then `width` - 1 inputs before each segment.
    """
    num_rows, num_before = forest.num_rows, width - 1
    num_segments = len(forest.num_pending)
    first_before = num_rows + num_before * np.arange(num_segments)
    # What precedes the oldest input is never asked for.
    before_of_inputs = np.arange(num_rows, num_rows + num_segments * num_before) - 1
    last_inputs = (first_before + num_before - 1)[forest.segment_of_row]
    before = np.concatenate([np.where(forest.parents == NO_ROW, last_inputs, forest.parents), before_of_inputs])
    places = np.empty((num_rows, width), np.int64)
    places[:, -1] = np.arange(num_rows)
    for place in range(width - 2, -1, -1):
        places[:, place] = before[places[:, place + 1]]
    return places
