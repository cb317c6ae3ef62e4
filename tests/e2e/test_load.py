"""The load benchmark against the bundled models, in windows too short to say how fast anything is."""

from __future__ import annotations

from coppice.checkpoints.bundled import MODELS
from coppice.cli.topology import Topology
from coppice.lab.bench.comparison import Plan, Setup
from coppice.lab.bench.load.loads import Arrival
from coppice.lab.bench.load.suite import LoadPlan, LoadSuite
from coppice.lab.bench.prompts import Prompt

PROMPTS = tuple(Prompt(text, "here") for text in ("def add(a, b):\n", "import os\n", "class Stack:\n    def"))


async def test_every_policy_under_every_load_gives_the_tokens_of_plain_decoding(topology: Topology) -> None:
    plan = LoadPlan(
        concurrency=(4,),
        duration_s=0.5,
        rates=(0.5,),
        trace=(Arrival(0.0, 6), Arrival(0.2, 30)),
        step=4,
    )
    setup = Setup(MODELS / "target", PROMPTS, Plan(1, 24, (0.8,), 0), threads=1)
    suite = LoadSuite(setup, plan, min_tokens=4)
    report = await suite.run(topology.address)
    assert report["mismatches"] == []
    rows = {row["name"]: row for row in report["rows"]}
    assert len(rows) == 4 * 4
    for row in rows.values():
        assert row["num_failed"] == row["num_refused"] == 0
    assert rows["planner trace"]["num_completed"] == 2
    # Counted by the server: without speculation there are no drafts, with it there are, within the budget.
    assert rows["off trace"]["nodes_per_round"] == 0
    assert rows["off trace"]["mean_acceptance_length"] == 1
    assert 0 < rows["fixed-small trace"]["nodes_per_round"] <= 4
    assert rows["fixed-small trace"]["mean_acceptance_length"] > 1
    assert report["ratios"]["planner/off.c4"] > 0
