"""What services write down, what is made of it, and which loads there are."""

from __future__ import annotations

from coppice.lab.bench.profile.records import (
    CpuRecord,
    DraftRecord,
    OpeningRecord,
    PassRecord,
    Records,
    RoundRecord,
    TreeRecord,
)
from coppice.lab.bench.profile.suite import ProfilePlan, seen

RECORDS = Records(
    (
        PassRecord(1.0, 1.25, 1.5, 40, ()),
        PassRecord(2.0, 2.75, 3.0, 9, (RoundRecord("a", 30, 3, 4), RoundRecord("b", 20, 1, 0))),
    ),
    (OpeningRecord("a", 0.5), OpeningRecord("b", 0.75)),
    (TreeRecord("a", 30, 1.75),),
    (DraftRecord("a", 30, 30, 0.5, 0.75, 1.5, 4),),
    (CpuRecord(1.0, 0.25), CpuRecord(2.5, 0.75)),
)


def test_what_was_seen_is_of_the_spans_alone() -> None:
    figures = seen(RECORDS, [(1.9, 2.9), (3.0, 4.0)])
    assert figures == {
        "passes_per_s": 0.5,
        "pass_ms": 750.0,
        "rounds_per_s": 1.0,
        "drafted_share": 0.5,
        "drafts_per_s": 0.0,
    }
    assert seen(RECORDS, [(0.0, 4.0)])["drafts_per_s"] == 0.25


def test_no_load_that_is_predicted_drafts_as_one_that_was_fitted_to() -> None:
    plan = ProfilePlan(validation=(1, 4, 16, 64), num_runs=2)
    runs = [list(plan.turns(15, run)) for run in range(plan.num_runs)]
    turns = [turn for run in runs for turn in run]
    assert len(turns) == plan.num_turns() == 2 * (3 * 3 + 4 * 4)
    kinds = [{turn.policy.simulated for turn in turns if turn.calibrates == calibrates} for calibrates in (True, False)]
    assert kinds[0] == {"off", "fixed=2", "fixed=8"}
    assert kinds[1] == {"off", "fixed=4", "fixed=15", "planner"}
    # In each run, and where there are both kinds they take turns at the same number of requests.
    for run in runs:
        levels = [turn.load.concurrency for turn in run]
        assert levels == sorted(levels)
