"""The timeline keeps the latest events, and what is written can be read."""

from __future__ import annotations

import time
from pathlib import Path

from coppice.obs.timeline import SUFFIX, StreamTimeline, Timeline, TimelineEvent, open_timeline, read_timeline
from coppice.v1 import drafter_pb2, tree_pb2, verifier_pb2


def test_events_are_read_as_they_were_kept_and_the_oldest_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "new" / f"a{SUFFIX}"
    timeline = Timeline(path, capacity=3)
    before_us = time.monotonic() * 1e6
    for number in range(3):
        timeline.mark("news", sequence=number, base=10, size=2)
    timeline.took("pass", 1.5, 1.75, size=9, sequences=[4, 5])
    timeline.write()
    first, second, last = read_timeline(path)
    assert [(event.what, event.sequence, event.base, event.size) for event in (first, second)] == [
        ("news", 1, 10, 2),
        ("news", 2, 10, 2),
    ]
    assert before_us <= first.at_us <= second.at_us <= time.monotonic() * 1e6
    assert last == TimelineEvent("pass", 1.5e6, 0.25e6, size=9, sequences=(4, 5))
    assert last.end_us == 1.75e6


def test_messages_are_marked_by_peer_kind_and_way() -> None:
    timeline = Timeline(Path("unused"))
    stream = StreamTimeline(timeline, "verifier")
    tree = tree_pb2.TokenTree(token_ids=[1, 2, 3])
    outcome = verifier_pb2.Outcome(base_length=5, token_ids=[1, 2], draft_nodes=6, pass_us=9)
    stream.heard(verifier_pb2.VerifyResponse(sequence_id=7, outcome=outcome))
    stream.told(verifier_pb2.VerifyRequest(sequence_id=7, draft=verifier_pb2.Draft(base_length=7, tree=tree)))
    stream.heard(drafter_pb2.DraftResponse(sequence_id=3, tree=drafter_pb2.DraftTree(base_length=9, tree=tree)))
    stream.told(verifier_pb2.VerifyRequest(sequence_id=7, close=verifier_pb2.CloseSequence()))
    stream.heard(verifier_pb2.VerifyRequest(sequence_id=8))
    stream.over()
    assert [(event.what, event.sequence, event.base, event.size) for event in timeline.events()] == [
        ("verifier.outcome.in", 7, 5, 2),
        ("verifier.draft.out", 7, 7, 3),
        ("verifier.tree.in", 3, 9, 3),
        ("verifier.close.out", 7, 0, 0),
        ("verifier.None.in", 8, 0, 0),
    ]
    assert [(event.num_verified, event.pass_us) for event in timeline.events()] == [(6, 9)] + 4 * [(0, 0)]
    stream.told(verifier_pb2.VerifyRequest(sequence_id=7, open=verifier_pb2.OpenSequence(request_id="r")))
    assert timeline.events()[-1].request_id == "r"


def test_it_is_off_unless_a_directory_is_named(tmp_path: Path) -> None:
    assert open_timeline("verifier", {}) is None
    assert open_timeline("verifier", {"TIMELINE_DIR": ""}) is None
    timeline = open_timeline("verifier", {"TIMELINE_DIR": str(tmp_path)})
    assert timeline is not None
    timeline.write()
    [path] = tmp_path.glob(f"verifier-*{SUFFIX}")
    assert read_timeline(path) == []
