"""Preemptions are counted from what the scheduler says; `tests/e2e/` proves that it still says it so."""

from __future__ import annotations

from coppice.cli.conformance import PreemptionLog


def test_counts_of_all_sequences_are_added_and_other_lines_are_none() -> None:
    log = PreemptionLog()
    for line in (
        "[verifier] INFO sequence 7 of stream 0 was preempted 2 times and computed 70 tokens again",
        "[verifier] INFO sequence 12 of stream 0 was preempted 11 times and computed 9 tokens again",
        "[verifier] INFO attention is compiled",
        "[orchestrator] 5 times",
    ):
        log.read(line)
    assert log.num_preemptions == 13
