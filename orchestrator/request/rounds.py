"""Messages between a request and its verifier and drafters, in our own types."""

from __future__ import annotations

from dataclasses import dataclass

from coppice.core.denoising import LEFT_TO_DRAFTER, Denoising
from coppice.core.log_probs import TokenLogProbs
from coppice.core.sampling import SamplingParams, StoppingOptions
from coppice.core.tree import EMPTY_TREE, TokenTree
from coppice.v1 import sampling_pb2, tree_pb2

# Source names of the verifier's own drafts: in-pass re-drafts, and those from the request's own text.
REDRAFT = "redraft"
PROMPT_LOOKUP = "prompt-lookup"
# A head of the verifier, and a drafter of that kind.
HEAD = "eagle"


@dataclass(frozen=True)
class VerifyOpening:
    """Sequence to open at the verifier: new or resumed."""

    token_ids: tuple[int, ...]
    resumed_tokens: int
    sampling: SamplingParams
    stopping: StoppingOptions
    acceptance: sampling_pb2.AcceptanceRule
    exactness: sampling_pb2.Exactness
    linger_us: int
    priority: int
    # Feature size that drafters need, in numbers per token; 0 if none needs any.
    feature_size: int
    cache_salt: str
    top_log_probs: int | None
    request_id: str = ""
    # Trace context; empty without tracing.
    traceparent: str = ""
    synchronous: bool = False
    # Most nodes of in-pass re-drafts; 0 for none.
    max_redraft_nodes: int = 0
    max_lookup_nodes: int = 0
    max_head_nodes: int = 0
    # Most tokens of the prompt, the last ones, whose features drafters read.
    max_prompt_features: int = 0


@dataclass(frozen=True)
class DraftOpening:
    """Sequence to open at a drafter."""

    token_ids: tuple[int, ...]
    sampling: SamplingParams
    max_nodes: int
    acceptance: sampling_pb2.AcceptanceRule
    row_multiple: int = 1
    request_id: str = ""
    cache_salt: str = ""
    # Trace context; empty without tracing.
    traceparent: str = ""
    synchronous: bool = False
    denoising: Denoising = LEFT_TO_DRAFTER


@dataclass(frozen=True)
class Outcome:
    """Result of one round; fields as in `verifier.proto`."""

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
    # One per token, if requested.
    log_probs: tuple[TokenLogProbs, ...] = ()
    near_ties: int = 0
    draft_origin: tree_pb2.DraftOrigin = tree_pb2.DRAFT_ORIGIN_UNSPECIFIED
    bubble_us: int = 0
    # In-pass re-draft for the next round, of `redraft_nodes` nodes.
    redraft: TokenTree = EMPTY_TREE


@dataclass(frozen=True)
class Finish:
    """Finish reason of an output."""

    reason: sampling_pb2.FinishReason
    stop_match: str | None = None
    queue_us: int = 0
    # Prompt tokens found in the verifier's prefix cache.
    cached_tokens: int = 0


@dataclass(frozen=True)
class VerifierLoad:
    """Load of a verifier as last reported."""

    batch_size: int = 0
    rows: int = 0
    pass_us: int = 0
    queued_sequences: int = 0
    free_kv_blocks: int = 0


# Load before the first report.
UNKNOWN_LOAD = VerifierLoad()
