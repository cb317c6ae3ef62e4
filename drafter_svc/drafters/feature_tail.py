"""What the features of one sequence's latest tokens add to its passes: a bounded tail, whatever the sequence's length."""

from __future__ import annotations

import numpy as np

from drafter_svc.drafters.feature_inputs import FeatureInputs, FloatArray, read_features

# Tokens whose additions are kept, as many bytes each as a row of inputs has. Those that are read already need theirs no
# more, unless the cache is given up and has to be read again: further back it is then read without.
KEPT_TOKENS = 64


class FeatureTail:
    """Additions to the latest tokens, and to masks behind the last of them. Tokens without features have zeros."""

    def __init__(self, inputs: FeatureInputs) -> None:
        self._inputs = inputs
        self._tokens = np.zeros((0, inputs.hidden_size), np.float32)
        self._masks = np.zeros((inputs.num_masks, inputs.hidden_size), np.float32)

    def extend(self, num_tokens: int, features: bytes) -> None:
        """Take in the features of committed tokens, or of the last of them.

        Raises:
            InvalidRequestError: they cannot be those of these tokens.
        """
        rows = read_features(features, self._inputs.width, num_tokens)
        if not num_tokens:
            return
        added = np.zeros((num_tokens, self._inputs.hidden_size), np.float32)
        self._masks = np.zeros_like(self._masks)
        if len(rows):
            added[num_tokens - len(rows) :] = self._inputs.to_tokens(rows)
            self._masks = self._inputs.to_masks(rows[-1])
        self._tokens = np.concatenate([self._tokens, added])[-KEPT_TOKENS:]

    def additions(self, num_tokens: int, num_masks: int) -> FloatArray:
        """What is added to the last rows of a pass [n + num_masks, hidden].

        Its rows end with the last `num_tokens` committed tokens, of which the latest n are known, and with masks.
        """
        first = max(0, len(self._tokens) - num_tokens)
        return np.concatenate([self._tokens[first:], self._masks[:num_masks]])
