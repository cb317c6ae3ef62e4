"""Early scores of a pass's candidates: an early head's score of each token after its parent."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from coppice.kernels.cpu.compiler import compiled
from verifier_svc.extras.pruning.head import EarlyHead
from verifier_svc.extras.pruning.rows import Candidates
from verifier_svc.model.output_layer import OutputLayer

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]


class EarlyScores:
    """One head with one output layer. A parent's row is computed once for all of its children.

    On a CPU all but the low-rank products is compiled: for a few hundred candidates, torch's overhead exceeds the work.
    """

    def __init__(self, head: EarlyHead, output: OutputLayer) -> None:
        """Head and output layer must be on the device of the passes and have one dtype."""
        self._head = head
        self._output = output
        weight = output.weight
        self._device = weight.device
        tensors = (weight, head.norm_weight, head.norm_bias)
        self._is_compiled = weight.is_contiguous() and all(
            one.device.type == "cpu" and one.dtype == torch.float32 for one in tensors
        )
        # Compiled here, so that no request waits.
        row = np.zeros(1, np.int64)
        with torch.inference_mode():
            self.of(weight.new_zeros(1, head.hidden_size), Candidates(row, row, row, np.zeros(1)))

    def of(self, hidden: Tensor, candidates: Candidates) -> Tensor:
        """Scores [C], from hidden states [N, hidden] after the head's layer."""
        if self._is_compiled and hidden.dtype == torch.float32 and hidden.is_contiguous():
            return self._compiled(hidden, candidates)
        parents, places = np.unique(candidates.parent_rows, return_inverse=True)
        predicted = self._head.predict(hidden.index_select(0, self._on_device(parents)))
        rows = predicted.index_select(0, self._on_device(places.astype(np.int64)))
        return self._output.scores(rows, self._on_device(candidates.token_ids))

    def _compiled(self, hidden: Tensor, candidates: Candidates) -> Tensor:
        head, output = self._head, self._output
        weight, bias = head.norm_weight.numpy(), head.norm_bias.numpy()
        rows, places = normed_parents(
            hidden.numpy(), candidates.parent_rows, weight, bias, head.is_centred, float(head.eps)
        )
        added = head.addition(torch.from_numpy(rows)).numpy()
        products = pair_scores(rows, added, places, output.weight.numpy(), candidates.token_ids)
        return output.finish(torch.from_numpy(products), self._on_device(candidates.token_ids))

    def _on_device(self, array: IntArray) -> Tensor:
        return torch.from_numpy(array).to(self._device)


@compiled
def normed_parents(
    hidden: FloatArray, parent_rows: IntArray, weight: FloatArray, bias: FloatArray, is_centred: bool, eps: float
) -> tuple[FloatArray, IntArray]:
    """LayerNorm if `is_centred`, else RMSNorm, of the parents' rows of `hidden` [N, hidden], each once.

    Returns normed rows [P, hidden], and for each of `parent_rows` [C] its index among them.
    """
    size = hidden.shape[1]
    places = np.full(hidden.shape[0], -1, np.int64)
    found = np.empty(len(parent_rows), np.int64)
    num_parents = 0
    for index, row in enumerate(parent_rows):
        if places[row] < 0:
            places[row] = num_parents
            num_parents += 1
        found[index] = places[row]
    result = np.empty((num_parents, size), np.float32)
    for row in range(hidden.shape[0]):
        place = places[row]
        if place < 0:
            continue
        mean = np.float32(0)
        if is_centred:
            for column in range(size):
                mean += hidden[row, column]
            mean /= np.float32(size)
        square = np.float32(0)
        for column in range(size):
            value = hidden[row, column] - mean
            square += value * value
        factor = np.float32(1 / math.sqrt(square / size + eps))
        for column in range(size):
            result[place, column] = (hidden[row, column] - mean) * factor * weight[column] + bias[column]
    return result, found


@compiled
def pair_scores(
    rows: FloatArray, added: FloatArray, places: IntArray, table: FloatArray, token_ids: IntArray
) -> FloatArray:
    """Dot products of (rows + added) [P, hidden] at `places` [C] and table rows [V, hidden] of `token_ids` [C]."""
    result = np.empty(len(places), np.float32)
    for index in range(len(places)):
        place, token = places[index], token_ids[index]
        total = np.float32(0)
        for column in range(rows.shape[1]):
            total += (rows[place, column] + added[place, column]) * table[token, column]
        result[index] = total
    return result
