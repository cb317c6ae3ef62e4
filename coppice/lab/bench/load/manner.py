"""What a client does with its stream beside reading it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Manner:
    """A client that goes `leave_after_s` after it has sent its request, or rests for `pause_s` after each delta."""

    leave_after_s: float | None = None
    pause_s: float = 0.0


# It reads at once, and to the end.
ATTENTIVE = Manner()
