"""The outcome of a round for one sequence."""

from __future__ import annotations

from dataclasses import dataclass

from coppice.core.log_probs import TokenLogProbs
from coppice.core.tree import EMPTY_TREE, TokenTree
from verifier_svc.engine.draft_counts import DraftOrigin
from verifier_svc.verify.output_end import SequenceFinish


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """One round's result for one sequence."""

    base_length: int
    token_ids: tuple[int, ...]
    accepted_nodes: tuple[int, ...]
    draft_nodes: int
    draft_depth: int
    linger_s: float
    stale_drafts: int
    finish: SequenceFinish | None
    # One per token, if requested.
    log_probs: tuple[TokenLogProbs, ...] = ()
    # Tokens chosen at a near-tie, if counted.
    near_ties: int = 0
    # Origin of the verified draft; None without one.
    draft_origin: DraftOrigin | None = None
    # The target's own draft for the next round, if any.
    redraft: TokenTree = EMPTY_TREE
    # Draft nodes removed by early pruning.
    pruned_nodes: int = 0
    # Of `token_ids`, if requested.
    features: bytes = b""
