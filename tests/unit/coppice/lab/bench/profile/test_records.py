"""What services write down, what is made of it, and which loads there are."""

from __future__ import annotations

from coppice.lab.bench.profile.fits import (
    CpuRecord,
    DraftRecord,
    OpeningRecord,
    PassRecord,
    Records,
    RoundRecord,
    TreeRecord,
    records_of,
)
from coppice.lab.bench.profile.suite import ProfilePlan, seen
from coppice.obs.timeline import TimelineEvent as Event

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


def test_events_of_verifier_and_drafter_are_records_of_requests() -> None:
    """The second sequence has its prompt in two passes; the third pass begins before outcomes are on their way."""
    opened = [Event("orchestrator.open.in", at, sequence=at, request_id=name) for at, name in ((1, "a"), (2, "b"))]
    passes = [
        Event("pass", 10, 5, size=7, sequences=(1, 2)),
        Event("pass", 20, 8, size=9, sequences=(1, 2)),
        Event("pass", 30, 6, size=3, sequences=(2,)),
    ]
    messages = [
        Event("orchestrator.outcome.out", 16, 0, 1, 6, 1, pass_us=5),
        Event("orchestrator.draft.in", 18, 0, 1, 7, 4),
        Event("orchestrator.draft.in", 19, 0, 2, 5, 0),
        Event("orchestrator.outcome.out", 31, 0, 1, 7, 3, num_verified=4, pass_us=8),
        # Later than the end of the next pass.
        Event("orchestrator.outcome.out", 37, 0, 2, 5, 1, pass_us=8),
        Event("orchestrator.outcome.out", 38, 0, 2, 6, 1, pass_us=6),
    ]
    drafter = [
        Event("orchestrator.open.in", 3, sequence=8, request_id="a"),
        Event("draft", 4, 2, 8, size=5),
        Event("orchestrator.tree.out", 7, 0, 8, 6, 5),
        Event("orchestrator.outcome.in", 17, 0, 8, 6, 1),
        Event("draft", 17.5, 0.25, 8, size=4),
        Event("orchestrator.tree.out", 17.875, 0, 8, 7, 4),
        # Its tree is dropped, as the sequence has ended.
        Event("draft", 33, 1, 8, size=4),
    ]
    found = records_of([*opened, *messages, *passes], drafter, RECORDS.cpu)
    assert found.passes == (
        PassRecord(10 / 1e6, 15 / 1e6, 16 / 1e6, 7, (RoundRecord("a", 6, 1, 0),)),
        PassRecord(20 / 1e6, 28 / 1e6, 30 / 1e6, 9, (RoundRecord("a", 7, 3, 4), RoundRecord("b", 5, 1, 0))),
        PassRecord(30 / 1e6, 36 / 1e6, 38 / 1e6, 3, (RoundRecord("b", 6, 1, 0),)),
    )
    assert found.openings == (OpeningRecord("a", 1 / 1e6), OpeningRecord("b", 2 / 1e6))
    assert found.trees == (TreeRecord("a", 7, 18 / 1e6),)
    assert found.drafts == (
        DraftRecord("a", 6, 6, 3 / 1e6, 4 / 1e6, 6 / 1e6, 5),
        DraftRecord("a", 7, 1, 17 / 1e6, 17.5 / 1e6, 17.75 / 1e6, 4),
    )
    assert found.cpu == RECORDS.cpu


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
