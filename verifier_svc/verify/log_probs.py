"""Log-probabilities of what a round committed, for sequences that ask for them.

Each is a function of one row of the target's raw logits alone, the row that its token was drawn from: double precision,
and a sum whose order depends on the size of the vocabulary only. So they are the same whatever tree and batch the row
was computed in, wherever the row is.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from coppice.core.log_probs import TokenLogProbs
from coppice.core.tree import ROOT
from verifier_svc.verify.acceptance import Acceptance
from verifier_svc.verify.sampler import Logits


def committed_log_probs(logits: Logits, accepted: Acceptance, num_top: int) -> tuple[TokenLogProbs, ...]:
    """Of every committed token. `logits` [1 + nodes, vocab] are the root's and the tree's rows."""
    return tuple(
        token_log_probs(logits[node - ROOT], token, num_top)
        for node, token in zip(accepted.drawn_behind, accepted.token_ids, strict=True)
    )


def token_log_probs(logits: Logits, token: int, num_top: int) -> TokenLogProbs:
    """Of one token and of the `num_top` likeliest, from a row of raw logits [vocab]."""
    row = logits.astype(np.float64)
    highest = row.max()
    log_probs = row - (highest + np.log(np.exp(row - highest).sum()))
    top = _likeliest(row, min(num_top, row.size))
    return TokenLogProbs(float(log_probs[token]), tuple(top.tolist()), tuple(log_probs[top].tolist()))


def _likeliest(row: npt.NDArray[np.float64], num_top: int) -> npt.NDArray[np.intp]:
    """The tokens with the highest logits, highest first; of equal ones the lower id first."""
    if num_top == 0:
        return np.empty(0, np.intp)
    lowest_kept = np.partition(row, -num_top)[-num_top]
    candidates = np.flatnonzero(row >= lowest_kept)
    return candidates[np.argsort(-row[candidates], kind="stable")][:num_top]
