"""Metrics of the engine: written by one thread, readable by any."""

from __future__ import annotations

from collections.abc import Sequence

from coppice.core.errors import CoppiceError
from coppice.obs.metrics import histogram
from verifier_svc.engine.draft_counts import DraftCounts, DraftOrigin
from verifier_svc.engine.pass_plan import PassPlan
from verifier_svc.engine.round_outcome import RoundOutcome
from verifier_svc.verify.output_end import FinishReason

SECONDS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
# Statuses of failed sequences, counted from the start so that metrics show a 0.
USUAL_FAILURES = ("internal", "invalid_argument", "resource_exhausted", "unimplemented")


class EngineCounts:
    """Counts of passes, the time between them, and rounds."""

    def __init__(self) -> None:
        self.pass_s = histogram("coppice_verifier_pass_seconds", "Time of a forward pass.", SECONDS)
        self.pass_rows = histogram(
            "coppice_verifier_pass_rows", "Rows of a pass over all sequences, without padding.", ROWS
        )
        # Only while sequences are running.
        self.bubble_s = histogram(
            "coppice_verifier_bubble_seconds",
            "Time between two passes while sequences run, waiting for drafts included.",
            SECONDS,
        )
        self.num_failed_passes = 0
        self.num_rounds = 0
        # Tokens committed, and those chosen at a near-tie; near-ties are not counted in strict mode.
        self.num_tokens = 0
        self.num_near_ties = 0
        # Drafts and nodes before verification.
        self.drafts = DraftCounts()
        # Rounds with a draft; its nodes, and accepted ones.
        self.num_drafts = 0
        self.num_draft_nodes = 0
        self.num_accepted_nodes = 0
        # Rounds with a draft and accepted nodes, by origin.
        self.rounds_by_origin = dict.fromkeys(DraftOrigin, 0)
        self.accepted_by_origin = dict.fromkeys(DraftOrigin, 0)
        # Total seconds that rounds waited for drafts.
        self.linger_s = 0.0
        # Masks computed, and nodes of the resulting re-drafts.
        self.num_masks = 0
        self.num_redraft_nodes = 0
        # Passes with early pruning, and pruned nodes.
        self.num_pruned_passes = 0
        self.num_pruned_nodes = 0
        # Finished outputs by reason.
        self.finished = {reason.value: 0 for reason in FinishReason}
        # Sequences refused or failed, by status.
        self.failed = dict.fromkeys(USUAL_FAILURES, 0)
        self._last_end_s: float | None = None

    def pass_over(self, num_rows: int, started_s: float, ended_s: float) -> float:
        """Count a forward pass; returns the bubble before it in seconds, 0 if no sequences were running."""
        self.pass_s.observe(ended_s - started_s)
        self.pass_rows.observe(num_rows)
        bubble_s = 0.0
        if self._last_end_s is not None:
            bubble_s = started_s - self._last_end_s
            self.bubble_s.observe(bubble_s)
        self._last_end_s = ended_s
        return bubble_s

    def pass_failed(self) -> None:
        """Count a failed pass."""
        self.num_failed_passes += 1
        self._last_end_s = None

    def sequence_failed(self, error: CoppiceError) -> None:
        """Count a sequence that was refused or failed."""
        name = error.status.name.lower()
        self.failed[name] = self.failed.get(name, 0) + 1

    def nothing_runs(self) -> None:
        """No sequences are running: the time until the next pass is not a bubble."""
        self._last_end_s = None

    def rounds_over(self, plan: PassPlan, num_pruned: int, outcomes: Sequence[RoundOutcome]) -> None:
        """Count the rounds of a pass, of which `num_pruned` nodes were pruned."""
        if plan.mask_places is not None:
            self.num_masks += int((plan.mask_places >= 0).sum())
        self.num_pruned_passes += num_pruned > 0
        self.num_pruned_nodes += num_pruned
        self.num_rounds += len(outcomes)
        for outcome in outcomes:
            self.num_tokens += len(outcome.token_ids)
            self.num_near_ties += outcome.near_ties
            if outcome.draft_nodes:
                self.num_drafts += 1
                self.num_draft_nodes += outcome.draft_nodes
                self.num_accepted_nodes += len(outcome.accepted_nodes)
            if outcome.draft_origin is not None:
                self.rounds_by_origin[outcome.draft_origin] += 1
                self.accepted_by_origin[outcome.draft_origin] += len(outcome.accepted_nodes)
            self.linger_s += outcome.linger_s
            self.num_redraft_nodes += len(outcome.redraft)
