"""Short causal convolutions: a row's output is a weighted sum of its own input and its nearest ancestors'.

The state of a sequence is its last inputs. A row's products are added one after the other, the oldest first, each
rounded, so that its bits do not depend on other rows: on CPUs in a compiled loop, elsewhere in tensor operations.
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
        self._biases = None if bias is None else bias.detach()
        self._device = weight.device
        self._is_compiled = weight.device.type == "cpu" and weight.dtype == torch.float32
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
        self._keep(tuple([commit.rows[-1] for commit in commits]), tuple([commit.slot for commit in commits]))

    def begin(self, forest: RowForest) -> None:
        """Begin a pass, or its part after pruning."""
        self._coming = forest

    def __call__(self, inputs: Tensor) -> Tensor:
        """`inputs` [N, channels] of a pass, padding included, to outputs likewise."""
        forest = self.forest = self._coming
        width = self._num_inputs + 1
        self._windows = forest.once(("windows", width), lambda: windows(forest, width))
        known = forest.once("known", lambda: torch.from_numpy(forest.slots).to(self._device))
        before = torch.where((known >= 0)[:, None, None], self._states[known.clamp(min=0)], 0.0)
        self._inputs, self._before = inputs.to(self._weights.dtype).contiguous(), before.flatten(0, 1)
        output = torch.empty_like(self._inputs)
        output[forest.num_rows :] = 0
        # Compiled loops have no gradients, which training needs.
        is_compiled = self._is_compiled and not inputs.requires_grad
        (self._convolve if is_compiled else self._convolve_tensors)(output[: forest.num_rows])
        if len(forest.border_rows):
            self._keep(tuple(forest.border_rows.tolist()), tuple(forest.border_slots.tolist()))
        return output.to(inputs.dtype)

    def _convolve(self, output: Tensor) -> None:
        biases = _NO_BIASES if self._biases is None else self._biases.numpy()
        arrays = self._inputs.numpy(), self._before.numpy(), self._windows, self._weights.numpy(), biases
        num_threads = torch.get_num_threads() if len(output) * self._weights.numel() >= _WORTH_THREADS else 1
        self._threads.call(convolve, num_threads, *arrays, output.numpy(), new_counters(1))

    def _convolve_tensors(self, output: Tensor) -> None:
        """As `_convolve`, in single precision and rounded once."""
        inputs = torch.cat([self._inputs[: len(output)], self._before])
        key = "places", self._num_inputs
        places = self.forest.once(key, lambda: torch.from_numpy(self._windows.T.copy()).to(self._device))
        total = torch.zeros(output.shape, device=self._device)
        for place, weights in zip(places, self._weights.float(), strict=True):
            total += inputs[place] * weights
        output.copy_(total if self._biases is None else total + self._biases.float())

    def _keep(self, rows: tuple[int, ...], slots: tuple[int, ...]) -> None:
        """Write the last inputs up to these rows to slots."""
        forest = self.forest
        known = "kept", self._num_inputs, rows, slots
        places, destinations = forest.once(known, lambda: self._on_device(self._windows[list(rows), 1:], slots))
        last = self._before[(places - forest.num_rows).clamp(min=0)]
        own = self._inputs[places.clamp(max=forest.num_rows - 1)]
        self._states[destinations] = torch.where((places < forest.num_rows)[..., None], own, last)

    def _on_device(self, places: IntArray, slots: Sequence[int]) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(places).to(self._device), torch.tensor(slots, device=self._device)


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
