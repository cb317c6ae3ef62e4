"""What a drafter says of trees, as messages."""

from __future__ import annotations

from dataclasses import replace

from coppice.v1 import drafter_pb2 as pb
from coppice.wire.convert import tree_to_proto
from drafter_svc.session import AheadDrafts, SessionDraft


def draft_response(sequence_id: int, draft: SessionDraft, elapsed_s: float) -> pb.DraftResponse:
    """A tree that took so long."""
    tree = pb.DraftTree(base_length=draft.base_length, tree=tree_to_proto(draft.tree), draft_us=int(elapsed_s * 1e6))
    return pb.DraftResponse(sequence_id=sequence_id, tree=tree)


def ahead_response(sequence_id: int, ahead: AheadDrafts) -> pb.DraftResponse:
    """Trees behind likely outcomes."""
    response = pb.DraftResponse(sequence_id=sequence_id)
    for draft in ahead.drafts:
        response.ahead.trees.add(
            base_length=ahead.base_length,
            # The stream's sequence says whose they are; the orchestrator knows their source.
            tree=tree_to_proto(replace(draft.tree, source_names=())),
            assumed_token_ids=draft.assumed,
            outcome_log_prob=draft.log_prob,
        )
    return response
