"""CUDA graphs of passes of a few sizes: on a GPU, launching hundreds of small kernels takes longer than their work.

A graph reads its inputs from fixed addresses. A pass is therefore padded to the next size, its inputs are copied to
that size's buffers, and the attention kernel does the same with its own (`StaticKernel`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from verifier_svc.engine.pass_plan import PassPlan
from verifier_svc.kernels.base import StaticKernel

logger = logging.getLogger(__name__)

# Rows of the sizes. Beyond the last, computation takes longer than launches.
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)

# Logits [K, vocab], and other outputs of their rows [K, ...].
Outputs: TypeAlias = tuple[Tensor, ...]
# Token ids and positions [1, N], logit rows [K] and mask positions [N] if any, to outputs on the device.
Forward: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor | None], Outputs]


class Capture(Protocol):
    """Captures a function's device operations."""

    def __call__(self, function: Callable[[], Outputs]) -> tuple[Callable[[], object], Outputs]:
        """Run `function`; returns a function that replays it, and the tensors that hold its results each time.

        Raises:
            RuntimeError: an operation cannot be captured.
        """


@dataclass(frozen=True, slots=True)
class _RecordedPass:
    inputs: Tensor
    outputs: Outputs
    replay: Callable[[], object]


class PassGraphs:
    """Captured forwards of one model. Used by one thread at a time, between the kernel's `begin` and the pass's end.

    `inputs` of a graph [3, N] are token ids, position ids and logit rows; with masks [4, N] also their positions.
    Padded logit rows repeat row 0.
    """

    def __init__(self, kernel: StaticKernel, capture: Capture, buckets: Sequence[int] = BUCKETS) -> None:
        self.buckets = tuple(sorted(buckets))
        self._kernel = kernel
        self._capture = capture
        self._recordings: dict[Hashable, _RecordedPass] = {}
        self._is_off = False

    @property
    def num_recordings(self) -> int:
        """Number of captured sizes."""
        return len(self._recordings)

    def clear(self) -> None:
        """Drop all graphs before their memory is freed."""
        self._recordings = {}

    def padded(self, plan: PassPlan) -> PassPlan | None:
        """The pass padded to the next size; None if it is to run eagerly."""
        size = next((bucket for bucket in self.buckets if bucket >= len(plan.token_ids)), None)
        # Part of a prompt needs no logits, but would get those of every row.
        if self._is_off or size is None or not len(plan.logit_rows):
            return None
        padding = np.zeros(size - len(plan.token_ids), np.int64)
        token_ids, positions = (np.concatenate([array, padding]) for array in (plan.token_ids, plan.positions))
        mask_places = plan.mask_places
        if mask_places is not None:
            mask_places = np.concatenate([mask_places, padding - 1])
        return replace(plan, token_ids=token_ids, positions=positions, mask_places=mask_places)

    def run(self, plan: PassPlan, forward: Forward) -> Outputs | None:
        """Result of `forward` for a padded pass, valid until the next one; None if it cannot be captured."""
        size = len(plan.token_ids)
        key = size, self._kernel.layout(plan), plan.mask_places is not None, plan.wants_states
        if (recording := self._recordings.get(key)) is None:
            try:
                recording = self._recordings[key] = self._record(plan, forward)
            except RuntimeError as error:
                logger.warning("passes are not recorded, kernels are launched one by one: %s", error)
                self._is_off = True
                self.clear()
                return None
        recording.inputs.copy_(_inputs(plan), non_blocking=True)
        recording.replay()
        return tuple(output[: len(plan.logit_rows)] for output in recording.outputs)

    def _record(self, plan: PassPlan, forward: Forward) -> _RecordedPass:
        inputs = _inputs(plan).to(self._kernel.device)
        mask_places = None if plan.mask_places is None else inputs[3]
        replay, outputs = self._capture(lambda: forward(inputs[0][None], inputs[1][None], inputs[2], mask_places))
        logger.info("recorded a pass of %d rows", len(plan.token_ids))
        return _RecordedPass(inputs, outputs, replay)


def _inputs(plan: PassPlan) -> Tensor:
    rows = np.zeros(len(plan.token_ids), np.int64)
    rows[: len(plan.logit_rows)] = plan.logit_rows
    masks = () if plan.mask_places is None else (plan.mask_places,)
    return torch.from_numpy(np.stack([plan.token_ids, plan.position_ids, rows, *masks]))


class CudaCapture:
    """CUDA graphs sharing one memory pool: they never run concurrently, and results are read in between."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[], Outputs]) -> tuple[Callable[[], object], Outputs]:
        """See `Capture`."""
        # Run once outside the graph: compilation of kernels and creation of library handles cannot be captured.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            function()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads' calls, such as the event loop's, do not affect the capture.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = function()
        return graph.replay, result
