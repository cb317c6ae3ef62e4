"""Passes that began before the verifier had heard what is planned now: what they take is no measure of it."""

from __future__ import annotations

from orchestrator.planner.cost_model import PassSample

# A wait of this share of a pass does not show.
_NOTICEABLE = 0.1


class PlanLagFilter:
    """Tells passes that ran as planned from those behind a change from drafting to not drafting, or back.

    A round that has begun to wait goes on waiting until the verifier hears that it is not to. So a pass is what was
    planned once the one before it had ended as long after the change as a message takes there and an outcome back. One
    that lacks little of that can have waited that little longer than it was to.
    """

    def __init__(self) -> None:
        self._was_drafting: bool | None = None
        # Since the outcome with which what is planned changed.
        self._since_s = 0.0

    def pass_over(self, record: PassSample, way_s: float) -> bool:
        """A pass has ended; whether it ran as planned, if it takes so long to the verifier and back.

        Passes in which some ask and some do not, or prompts end, change nothing.
        """
        is_mixed = record.reads_prompt or (record.num_asked > 0 and not record.is_joint)
        is_drafting = record.num_asked > 0
        if not is_mixed and is_drafting != self._was_drafting:
            self._was_drafting, self._since_s = is_drafting, 0.0
        since_s = self._since_s
        self._since_s += record.pass_s + (record.gap_s or 0.0)
        return is_mixed or way_s - since_s <= _NOTICEABLE * record.pass_s
