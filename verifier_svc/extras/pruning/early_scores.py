"""Early scores of a pass's candidates: what an early head says of each under its parent."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from verifier_svc.extras.pruning.early_head import EarlyHead
from verifier_svc.extras.pruning.early_pruning import Candidates
from verifier_svc.model.output_layer import OutputLayer

CAN_COMPILE = True
try:
    from verifier_svc.extras.pruning.compiled_scores import normed_parents, pair_scores
except ImportError:
    CAN_COMPILE = False


class EarlyScores:
    """One head against one output layer. Each row that has children is predicted once.

    On a CPU all but the low-rank products is compiled: a pass has a few hundred candidates, and handing them to torch
    takes longer than what is done with them.
    """

    def __init__(self, head: EarlyHead, output: OutputLayer) -> None:
        """Both on the device of the passes, in one precision."""
        self._head = head
        self._output = output
        weight = output.weight
        self._device = weight.device
        tensors = (weight, head.norm_weight, head.norm_bias)
        self._is_compiled = (
            CAN_COMPILE
            and weight.is_contiguous()
            and all(one.device.type == "cpu" and one.dtype == torch.float32 for one in tensors)
        )
        # Compiled at its first use, which should not be a request's.
        row = np.zeros(1, np.int64)
        with torch.inference_mode():
            self.of(weight.new_zeros(1, head.hidden_size), Candidates(row, row, row, np.zeros(1)))

    def of(self, hidden: Tensor, candidates: Candidates) -> Tensor:
        """Scores [C], from the hidden states [N, hidden] behind the head's layer."""
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

    def _on_device(self, array: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Tensor:
        return torch.from_numpy(array).to(self._device)
