"""Log-probabilities of committed tokens, if requested.

Each is a function of the raw logits of the row that its token was drawn from: in double precision, with a summation
order that depends on the vocabulary size only. They therefore do not depend on the tree, the batch or the row's index.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from coppice.core.log_probs import TokenLogProbs
from coppice.core.tree import ROOT
from verifier_svc.verify.acceptance import Acceptance
from verifier_svc.verify.sampler import Logits


def committed_log_probs(logits: Logits, accepted: Acceptance, num_top: int) -> tuple[TokenLogProbs, ...]:
    """Log-probabilities of all committed tokens. `logits` [1 + nodes, vocab] are the root's and the tree's rows."""
    return tuple(
        token_log_probs(logits[node - ROOT], token, num_top)
        for node, token in zip(accepted.drawn_behind, accepted.token_ids, strict=True)
    )


def token_log_probs(logits: Logits, token: int, num_top: int) -> TokenLogProbs:
    """Log-probabilities of one token and of the `num_top` likeliest, from a row of raw logits [vocab]."""
    row = logits.astype(np.float64)
    highest = row.max()
    log_probs = row - (highest + np.log(np.exp(row - highest).sum()))
    top = _likeliest(row, min(num_top, row.size))
    return TokenLogProbs(float(log_probs[token]), tuple(top.tolist()), tuple(log_probs[top].tolist()))


def _likeliest(row: npt.NDArray[np.float64], num_top: int) -> npt.NDArray[np.intp]:
    """Tokens with the highest logits, descending; ties by lower id."""
    if num_top == 0:
        return np.empty(0, np.intp)
    lowest_kept = np.partition(row, -num_top)[-num_top]
    candidates = np.flatnonzero(row >= lowest_kept)
    return candidates[np.argsort(-row[candidates], kind="stable")][:num_top]
