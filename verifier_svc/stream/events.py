"""The verifier's events for an orchestrator, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from coppice.core.errors import CoppiceError, InvalidRequestError
from verifier_svc.engine.round_outcome import RoundOutcome
from verifier_svc.verify.output_end import SequenceFinish


@dataclass(frozen=True, slots=True)
class OutcomeEvent:
    """A round of a sequence is over; `finish` in the outcome means that the sequence is, too."""

    sequence_id: int
    outcome: RoundOutcome
    pass_rows: int
    pass_s: float
    queue_s: float
    cached_tokens: int
    # Since the pass before, while there were sequences to run all along.
    bubble_s: float = 0.0


@dataclass(frozen=True, slots=True)
class CompleteEvent:
    """A sequence's output was complete when it was opened: no round was needed."""

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
    """What the verifier is busy with."""

    batch_size: int
    rows: int
    pass_s: float
    queued_sequences: int
    free_kv_blocks: int
    running_sequences: int


@dataclass(frozen=True, slots=True)
class DraftRejection:
    """A draft was not a valid tree and was dropped; the sequence goes on."""

    sequence_id: int
    base_length: int
    error: InvalidRequestError


@dataclass(frozen=True, slots=True)
class DrainEvent:
    """The verifier was asked to stop."""


Event: TypeAlias = OutcomeEvent | CompleteEvent | ErrorEvent | LoadEvent | DraftRejection | DrainEvent
