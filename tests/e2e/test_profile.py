"""The profile suite against the bundled models, too short to say how long anything takes."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.profile.drafter_peer import num_right
from benchmarks.profile.suite import Addresses, ProfilePlan, ProfileSuite
from benchmarks.prompts import Prompt
from coppice.bundled import MODELS
from coppice.cli.topology import Topology
from coppice.client import Client, Options
from coppice.tokenizer import TargetTokenizer, load_tokenizer_json
from simulator.loads import ClosedLoad, Workload
from simulator.policies import Policy
from simulator.profile import profile_from_json
from simulator.scenario import Scenario

PROMPTS = tuple(
    Prompt(text, "here")
    for text in (
        "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n",
        "import os\nimport sys\n\n",
        "class Stack:\n",
    )
)
PLAN = ProfilePlan(
    contexts=(32, 16),
    batches=(1, 2),
    nodes=(0, 3),
    far=((1, 3),),
    right=((2, 3),),
    num_rounds=6,
    prompt_sizes=(8, 24),
    plain_batches=(1, 2),
    budgets=(3, 7),
    num_timed_outputs=2,
    recorded_tokens=32,
    recorded_nodes=16,
    contention_rounds=12,
)


async def test_what_is_recorded_is_what_the_models_say_and_the_simulator_runs_on_it(
    topology: Topology, bundled: Client
) -> None:
    [verifier], [drafter] = topology.verifier_addresses, topology.drafter_addresses
    suite = ProfileSuite(MODELS / "target", PROMPTS, threads=1, plan=PLAN)
    report = await suite.run(Addresses(topology.address, verifier, drafter))
    profile = profile_from_json(json.loads(json.dumps(report)))
    tokenizer = TargetTokenizer(load_tokenizer_json(Path(MODELS / "target")))
    options = Options(max_tokens=PLAN.recorded_tokens, temperature=0.0, ignore_eos=True, speculation="off")
    for prompt, trace in zip(PROMPTS, profile.traces, strict=True):
        assert trace.num_prompt == len(tokenizer.encode(prompt.text))
        assert trace.token_ids == (await bundled.generate(prompt.text, options)).token_ids
    # A drafter that was trained on the target is right more often than not.
    right = [
        num_right(tree, trace.token_ids[at:]) > 0 for trace in profile.traces for at, tree in enumerate(trace.trees)
    ]
    assert sum(right) > len(right) / 2
    # Right drafts were accepted, wrong ones not, and every pass that counts had them all. On a busy machine there may
    # be none that had both sequences.
    names = {row["name"] for row in report["rows"]}
    assert {"1x0@32", "1x3@16"} <= names <= {"1x0@32", "1x3@32", "2x0@32", "2x3@32", "2x3-right@32", "1x3@16"}
    costs = profile.machine.verifier
    assert costs.passes.seconds[-1] > 0
    scenario = Scenario(profile.machine, Workload(profile.traces, 8, 24))
    speeds = [scenario.run(Policy.parse(name), ClosedLoad(2, 1.0)).tokens_per_s for name in ("off", "fixed=3")]
    assert min(speeds) > 0
