"""Recurrences with a matrix as state on a GPU, in Triton, see `kernels/triton/recurrences.py`; fails without Triton."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from triton.errors import TritonError

from coppice.core.errors import IncompatibleError
from verifier_svc.engine.kv_cache import IntArray
from verifier_svc.kernels.triton.recurrences import advance_walks
from verifier_svc.kernels.triton.walks import STEP_FIELDS, Walks, path_walks, tree_walks
from verifier_svc.layers.recurrence import RowForest, StateCommit

# Columns of a state per program, of at most so many numbers: those fit into a program's registers.
_MOST_COLUMNS, _MOST_NUMBERS = 32, 4096
# Smallest width of a tile.
_LEAST_WIDTH = 16


class DeviceWalks:
    """Walks on a device."""

    def __init__(self, walks: Walks, device: torch.device) -> None:
        self.num_walks, self.num_steps, self.num_places = len(walks.starts) - 1, len(walks.steps), walks.num_places
        self.starts, self.steps = (
            torch.from_numpy(array.astype(np.int32)).to(device) for array in (walks.starts, walks.steps)
        )


class TritonRecurrence:
    """States [heads, key size, value size] of one layer in single precision, as in `LinearRecurrence`."""

    def __init__(
        self,
        device: torch.device,
        num_heads: int,
        key_size: int,
        value_size: int,
        *,
        corrects: bool,
        rates: Tensor | None = None,
    ) -> None:
        self._device = device
        self._shape = num_heads, key_size, value_size
        self._corrects = corrects
        self._rates = None if rates is None else rates.contiguous()
        self._states = self._after = torch.empty(0, *self._shape, device=device)
        # Of the last call's nodes, the only rows that a commit goes over again.
        self._inputs: list[Tensor] = []
        self._coming = self.forest = RowForest(())

    @property
    def bytes_per_state(self) -> int:
        """Bytes of the matrices of all heads."""
        return int(np.prod(self._shape)) * self._states.itemsize

    def allocate(self, num_slots: int) -> None:
        """Allocate states."""
        self._states = torch.zeros(num_slots, *self._shape, device=self._device)

    def copy(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy states."""
        self._states[destinations] = self._states[sources]

    def begin(self, forest: RowForest) -> None:
        """Begin a pass, or its part after pruning."""
        self._coming = forest

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor, decays: Tensor, steps: Tensor) -> Tensor:
        """Outputs [N, heads, value size] of a pass in the dtype of `values`, zero for padding.

        Arguments as in `LinearRecurrence`.
        """
        forest = self.forest = self._coming
        walks = forest.once("walks", lambda: DeviceWalks(_tree_walks(forest), self._device))
        nodes = forest.once("nodes", lambda: torch.from_numpy(_nodes_of(forest)).to(self._device))
        # Copies begin at an aligned address: for others Triton would compile other code.
        inputs = [
            part.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
            for part in (queries, keys, values, decays, steps)
        ]
        self._after = self._states.new_empty(len(forest.num_pending), *self._shape)
        output = torch.zeros(values.shape, device=self._device)
        self._launch(inputs, walks, output)
        self._inputs = [part.index_select(0, nodes) for part in inputs]
        return output.to(values.dtype)

    def commit(self, commits: Sequence[StateCommit]) -> None:
        """Replay accepted nodes after their segment's pending tokens."""
        forest = self.forest
        slots, segments, walks = forest.once(tuple(commits), lambda: _path_walks(forest, commits, self._device))
        self._states[slots] = self._after[segments]
        self._launch(self._inputs, walks, torch.empty_like(self._inputs[2]))

    def _launch(self, inputs: list[Tensor], walks: DeviceWalks, output: Tensor) -> None:
        if walks.num_steps == 0:
            return
        queries, keys, values, decays, strengths = inputs
        num_heads, key_size, value_size = self._shape
        width = _power_of_two(key_size)
        columns = min(_MOST_COLUMNS, _power_of_two(value_size), max(1, _MOST_NUMBERS // width))
        try:
            advance_walks[(walks.num_walks, num_heads, -(-value_size // columns))](
                queries,
                keys,
                values,
                decays,
                strengths,
                output if self._rates is None else self._rates,
                walks.starts,
                walks.steps,
                self._states,
                self._after,
                # Of one layer at a time.
                self._states.new_empty(walks.num_places, *self._shape),
                output,
                FIELDS=STEP_FIELDS,
                HEADS=num_heads,
                GROUPS=keys.shape[1],
                KEYS=key_size,
                VALUES=value_size,
                WIDTH=width,
                COLUMNS=columns,
                DECAYS=decays.shape[2],
                STRENGTHS=strengths.shape[2],
                CORRECTS=self._corrects,
                HAS_RATES=self._rates is not None,
                num_warps=4,
                # Loads must not be moved ahead of the stores of rows before.
                num_stages=1,
                # The default differs among versions of Triton.
                enable_fp_fusion=False,
            )
        except TritonError as error:
            raise IncompatibleError(f"recurrent layers do not run in Triton on this device: {error}") from error


def _tree_walks(forest: RowForest) -> Walks:
    border_of_row = np.full(forest.num_rows, -1, np.int64)
    border_of_row[forest.border_rows] = forest.border_slots
    return tree_walks(forest.starts, forest.num_pending, forest.slots, forest.parents, border_of_row)


def _path_walks(
    forest: RowForest, commits: Sequence[StateCommit], device: torch.device
) -> tuple[Tensor, Tensor, DeviceWalks]:
    """Slots and segments [commits], and walks over accepted nodes, counted among all nodes of the pass."""
    nodes = _nodes_of(forest)
    paths = [np.searchsorted(nodes, commit.rows[forest.num_pending[commit.segment] :]).tolist() for commit in commits]
    slots, segments = ([getattr(commit, name) for commit in commits] for name in ("slot", "segment"))
    walks = DeviceWalks(path_walks(paths, slots), device)
    return torch.tensor(slots, device=device), torch.tensor(segments, device=device), walks


def _nodes_of(forest: RowForest) -> IntArray:
    """Rows that are nodes of trees."""
    is_node = np.arange(forest.num_rows) >= (forest.starts[:-1] + forest.num_pending)[forest.segment_of_row]
    return np.flatnonzero(is_node)


def _power_of_two(number: int) -> int:
    """Smallest power of two of at least both `number` and a tile's width."""
    return max(_LEAST_WIDTH, 1 << (number - 1).bit_length())
