"""The verifier's events for an orchestrator, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias, TypeGuard

from coppice.core.errors import CoppiceError, InvalidRequestError
from verifier_svc.engine.prompt_states import PromptStates
from verifier_svc.engine.round_outcome import RoundOutcome
from verifier_svc.verify.output_end import SequenceFinish


@dataclass(frozen=True, slots=True)
class OutcomeEvent:
    """End of a sequence's round; with `finish` in the outcome, also of the sequence."""

    sequence_id: int
    outcome: RoundOutcome
    pass_rows: int
    pass_s: float
    queue_s: float
    cached_tokens: int
    # Idle time since the previous pass, if sequences were running throughout.
    bubble_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PromptEvent:
    """Features of part of a sequence's prompt."""

    sequence_id: int
    states: PromptStates


@dataclass(frozen=True, slots=True)
class CompleteEvent:
    """The output was complete when the sequence was opened; no round was needed."""

    sequence_id: int
    finish: SequenceFinish
    queue_s: float


@dataclass(frozen=True, slots=True)
class ErrorEvent:
    """A sequence failed and is closed."""

    sequence_id: int
    error: CoppiceError


@dataclass(frozen=True, slots=True)
class LoadEvent:
    """Load of the verifier."""

    batch_size: int
    rows: int
    pass_s: float
    queued_sequences: int
    free_kv_blocks: int
    running_sequences: int


@dataclass(frozen=True, slots=True)
class DraftRejection:
    """An invalid draft was dropped; the sequence continues."""

    sequence_id: int
    base_length: int
    error: InvalidRequestError


@dataclass(frozen=True, slots=True)
class DrainEvent:
    """The verifier is stopping."""


Event: TypeAlias = OutcomeEvent | PromptEvent | CompleteEvent | ErrorEvent | LoadEvent | DraftRejection | DrainEvent


def is_last(event: Event) -> TypeGuard[OutcomeEvent | CompleteEvent | ErrorEvent]:
    """Whether an event is the last one of its sequence."""
    if isinstance(event, OutcomeEvent):
        return event.outcome.finish is not None
    return isinstance(event, (CompleteEvent, ErrorEvent))
