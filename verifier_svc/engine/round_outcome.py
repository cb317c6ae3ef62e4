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
    # One per token, when asked for.
    log_probs: tuple[TokenLogProbs, ...] = ()
    # Tokens chosen at a near-tie, where these are counted.
    near_ties: int = 0
    # When the verified draft was made; None without one.
    draft_origin: DraftOrigin | None = None
    # The target's own draft for the next round.
    redraft: TokenTree = EMPTY_TREE
    # Nodes of the draft that early pruning took out of the pass.
    pruned_nodes: int = 0
    # Those of `token_ids`, for sequences that want them.
    features: bytes = b""
