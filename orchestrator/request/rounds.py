"""The messages between a request and its back ends, in our own types."""

from __future__ import annotations

from dataclasses import dataclass

from coppice.core.denoising import LEFT_TO_DRAFTER, Denoising
from coppice.core.log_probs import TokenLogProbs
from coppice.core.sampling import SamplingParams, StoppingOptions
from coppice.core.tree import EMPTY_TREE, TokenTree
from coppice.v1 import sampling_pb2, tree_pb2

# The source of the target's own drafts, as the verifier names it.
REDRAFT = "redraft"


@dataclass(frozen=True)
class VerifyOpening:
    """A sequence as the verifier is asked to run it: from its beginning, or on from where it was."""

    token_ids: tuple[int, ...]
    resumed_tokens: int
    sampling: SamplingParams
    stopping: StoppingOptions
    acceptance: sampling_pb2.AcceptanceRule
    exactness: sampling_pb2.Exactness
    linger_us: int
    priority: int
    # Numbers of the committed tokens' features that drafters take; 0 where none takes any.
    feature_size: int
    cache_salt: str
    top_log_probs: int | None
    request_id: str = ""
    # The span that it belongs to; empty where nobody traces.
    traceparent: str = ""
    synchronous: bool = False
    # Most nodes of the target's own drafts; 0 for none.
    max_redraft_nodes: int = 0


@dataclass(frozen=True)
class DraftOpening:
    """A sequence as a drafter is asked to follow it."""

    token_ids: tuple[int, ...]
    sampling: SamplingParams
    max_nodes: int
    acceptance: sampling_pb2.AcceptanceRule
    row_multiple: int = 1
    request_id: str = ""
    cache_salt: str = ""
    # The span that it belongs to; empty where nobody traces.
    traceparent: str = ""
    synchronous: bool = False
    denoising: Denoising = LEFT_TO_DRAFTER


@dataclass(frozen=True)
class Outcome:
    """One round's result, fields as in `verifier.proto`."""

    base_length: int
    token_ids: tuple[int, ...]
    num_accepted: int
    draft_nodes: int
    draft_depth: int
    redraft_nodes: int
    features: bytes
    pass_rows: int
    pass_us: int
    linger_us: int
    stale_drafts: int
    # One per token, when asked for.
    log_probs: tuple[TokenLogProbs, ...] = ()
    near_ties: int = 0
    draft_origin: tree_pb2.DraftOrigin = tree_pb2.DRAFT_ORIGIN_UNSPECIFIED
    bubble_us: int = 0
    # The target's own draft for the next round, of `redraft_nodes` nodes.
    redraft: TokenTree = EMPTY_TREE

    @property
    def had_fresh_draft(self) -> bool:
        """Whether the round began with a draft that was made for it."""
        return self.draft_origin == tree_pb2.DRAFT_ORIGIN_FRESH


@dataclass(frozen=True)
class Finish:
    """Why an output ended."""

    reason: sampling_pb2.FinishReason
    stop_match: str | None = None
    queue_us: int = 0
    # Prompt tokens that the verifier did not compute anew.
    cached_tokens: int = 0
