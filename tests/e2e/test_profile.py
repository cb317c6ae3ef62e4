"""The profile suite against the bundled models, too short to say how long anything takes."""

from __future__ import annotations

import json

from coppice.checkpoints.bundled import MODELS
from coppice.cli.topology import TopologySpec
from coppice.core.tree import ROOT, TokenTree
from coppice.lab.bench.profile.suite import ProfilePlan, ProfileSuite
from coppice.lab.bench.prompts import Prompt
from coppice.lab.simulator.profile import profile_from_json
from coppice.lab.simulator.scenario import compare

PROMPTS = tuple(
    Prompt(text, "here")
    for text in (
        "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n",
        "import os\nimport sys\n\n",
        "class Stack:\n",
    )
)
PLAN = ProfilePlan(
    calibration=(1,), budgets=(3,), validation=(2,), num_runs=1, duration_s=0.7, recorded_tokens=32, recorded_nodes=16
)


async def test_services_record_what_they_did_and_the_simulator_runs_on_it() -> None:
    suite = ProfileSuite(MODELS / "target", PROMPTS, threads=1, plan=PLAN, min_tokens=16)
    measured, records = await suite.run(TopologySpec(device="cpu", threads=1))
    # Every token that clients got came of a round that was recorded, and rounds follow one another.
    said: dict[str, int] = {}
    for one in records.passes:
        assert one.started_s <= one.ended_s <= one.delivered_s
        assert one.rows >= sum(1 + each.num_nodes for each in one.rounds)
        for each in one.rounds:
            assert each.base_length == said.get(each.request_id, each.base_length)
            said[each.request_id] = each.length
    assert {one.request_id for one in records.openings} >= said.keys()
    # Drafts of the recorded traces are of no request.
    drafted = {one.request_id for one in records.drafts} - {""}
    assert drafted
    assert drafted <= {one.request_id for one in records.openings}
    completed = [answer for taken in measured.taken for answer in taken.sample.answers if answer.completion]
    assert completed
    report, loads = (json.loads(json.dumps(one)) for one in suite.reports(measured, records))
    assert not loads["mismatches"]
    profile = profile_from_json(report)
    right = [
        _first_is_right(tree, trace.token_ids[at]) for trace in profile.traces for at, tree in enumerate(trace.trees)
    ]
    # A drafter that was trained on the target is right more often than not.
    assert sum(right) > len(right) / 2
    rows = list(compare(profile, loads))
    assert [row["name"] for row in rows] == ["off c2", "fixed-small c2", "fixed-large c2", "planner c2"]
    assert all(row["tokens_per_s"] > 0 and row["measured_passes_per_s"] > 0 for row in rows)


def _first_is_right(tree: TokenTree, token: int) -> bool:
    return (ROOT, token) in tree.children
