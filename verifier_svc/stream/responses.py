"""Conversion of the verifier's events to messages."""

from __future__ import annotations

from collections.abc import Iterator

from coppice.core.errors import InvalidRequestError
from coppice.net.rpc import error_status
from coppice.v1 import features_pb2, sampling_pb2, tree_pb2, verifier_pb2
from coppice.wire.convert import add_log_probs, put_tree
from verifier_svc.engine.draft_counts import DraftOrigin
from verifier_svc.stream.events import (
    CompleteEvent,
    DraftRejection,
    DrainEvent,
    ErrorEvent,
    Event,
    LoadEvent,
    OutcomeEvent,
    PromptEvent,
)
from verifier_svc.verify.output_end import FinishReason, SequenceFinish

# Of the features in one message.
_MOST_PROMPT_BYTES = 1 << 20
_FINISH_REASONS = {
    FinishReason.EOS: sampling_pb2.FINISH_REASON_EOS,
    FinishReason.STOP: sampling_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: sampling_pb2.FINISH_REASON_LENGTH,
    FinishReason.CONTEXT_LENGTH: sampling_pb2.FINISH_REASON_CONTEXT_LENGTH,
}
DRAFT_ORIGINS = {
    None: tree_pb2.DRAFT_ORIGIN_UNSPECIFIED,
    DraftOrigin.FRESH: tree_pb2.DRAFT_ORIGIN_FRESH,
    DraftOrigin.LEFT_OVER: tree_pb2.DRAFT_ORIGIN_LEFT_OVER,
    DraftOrigin.REROOTED: tree_pb2.DRAFT_ORIGIN_REROOTED,
    DraftOrigin.AHEAD: tree_pb2.DRAFT_ORIGIN_AHEAD,
    DraftOrigin.REDRAFT: tree_pb2.DRAFT_ORIGIN_REDRAFT,
}


def responses(event: Event) -> Iterator[verifier_pb2.VerifyResponse]:
    """Messages of an event."""
    if isinstance(event, OutcomeEvent):
        yield verifier_pb2.VerifyResponse(sequence_id=event.sequence_id, outcome=_outcome(event))
        finish = event.outcome.finish
        if finish is not None:
            finished = _finished(finish, event.queue_s, event.cached_tokens)
            yield verifier_pb2.VerifyResponse(sequence_id=event.sequence_id, finished=finished)
    elif isinstance(event, PromptEvent):
        for first_token, features in event.states.pieces(_MOST_PROMPT_BYTES):
            message = features_pb2.PromptFeatures(first_token=first_token, features=features)
            yield verifier_pb2.VerifyResponse(sequence_id=event.sequence_id, prompt_features=message)
    elif isinstance(event, CompleteEvent):
        finished = _finished(event.finish, event.queue_s)
        yield verifier_pb2.VerifyResponse(sequence_id=event.sequence_id, finished=finished)
    elif isinstance(event, ErrorEvent):
        yield verifier_pb2.VerifyResponse(sequence_id=event.sequence_id, error=_error(event))
    elif isinstance(event, DraftRejection):
        yield verifier_pb2.VerifyResponse(sequence_id=event.sequence_id, draft_rejected=_rejection(event))
    elif isinstance(event, DrainEvent):
        yield verifier_pb2.VerifyResponse(draining=verifier_pb2.Draining())
    else:
        yield verifier_pb2.VerifyResponse(load=_load(event))


def microseconds(seconds: float) -> int:
    """Whole microseconds, at least 0."""
    return max(0, round(seconds * 1e6))


def _outcome(event: OutcomeEvent) -> verifier_pb2.Outcome:
    outcome = event.outcome
    message = verifier_pb2.Outcome(
        base_length=outcome.base_length,
        token_ids=outcome.token_ids,
        accepted_nodes=outcome.accepted_nodes,
        draft_nodes=outcome.draft_nodes,
        draft_depth=outcome.draft_depth,
        pass_rows=event.pass_rows,
        pass_us=microseconds(event.pass_s),
        linger_us=microseconds(outcome.linger_s),
        stale_drafts=outcome.stale_drafts,
        near_ties=outcome.near_ties,
        draft_origin=DRAFT_ORIGINS[outcome.draft_origin],
        bubble_us=microseconds(event.bubble_s),
        features=outcome.features,
    )
    if len(outcome.redraft):
        put_tree(outcome.redraft, message.redraft)
    add_log_probs(message, outcome.log_probs)
    return message


def _finished(finish: SequenceFinish, queue_s: float, cached_tokens: int = 0) -> verifier_pb2.SequenceFinished:
    return verifier_pb2.SequenceFinished(
        reason=_FINISH_REASONS[finish.reason],
        stop_match=finish.stop_match,
        queue_us=microseconds(queue_s),
        cached_tokens=cached_tokens,
    )


def _error(event: ErrorEvent) -> verifier_pb2.SequenceError:
    status = error_status(event.error)
    field = event.error.field if isinstance(event.error, InvalidRequestError) else ""
    return verifier_pb2.SequenceError(code=status.code, message=status.message, field=field)


def _rejection(event: DraftRejection) -> verifier_pb2.DraftRejected:
    status = error_status(event.error)
    return verifier_pb2.DraftRejected(
        base_length=event.base_length, code=status.code, message=status.message, field=event.error.field
    )


def _load(event: LoadEvent) -> verifier_pb2.Load:
    return verifier_pb2.Load(
        batch_size=event.batch_size,
        rows=event.rows,
        pass_us=microseconds(event.pass_s),
        queued_sequences=event.queued_sequences,
        free_kv_blocks=event.free_kv_blocks,
        running_sequences=event.running_sequences,
    )
