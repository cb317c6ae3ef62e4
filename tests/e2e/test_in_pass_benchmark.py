"""The in-pass benchmark on tiny random models: too small to say how much anything gains."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from coppice.cli.topology import DrafterSpec, TopologySpec
from coppice.lab.bench.ablation.groups import start_services
from coppice.lab.bench.ablation.in_pass import InPass, make_groups, measure_in_pass
from coppice.lab.bench.comparison import Plan, Setup
from coppice.lab.bench.prompts import Prompt
from coppice.lab.bench.services import measure_on
from tests.tiny_checkpoint import write_tiny_llama
from tests.unit.verifier_svc.adapters import random_adapter
from verifier_svc.extras.redraft.adapter import save_adapter

TEMPERATURES = (0.0, 1.0)


@pytest.mark.timeout(240)
async def test_a_target_that_drafts_for_itself_takes_turns_with_plain_decoding_and_says_the_same(
    tmp_path: Path,
) -> None:
    target, adapter = tmp_path / "target", tmp_path / "adapter"
    write_tiny_llama(target, vocab_size=64, max_context_tokens=128)
    save_adapter(random_adapter(AutoModelForCausalLM.from_pretrained(target), 2), adapter)
    what = InPass(DrafterSpec("small-lm", str(target)), str(adapter), 2, masks=(2,), groups=(1,))
    [group] = make_groups(what, TEMPERATURES)
    # Each variant has services of its own: those with a drafter are left out.
    group = replace(group, variants=tuple(one for one in group.variants if not one.drafters))
    setup = Setup(target, (Prompt("A", "here"), Prompt("B", "here")), Plan(1, 112, TEMPERATURES, 0), threads=1)
    measure = partial(measure_in_pass, setup, what, (group,), 2, ())
    spec = TopologySpec(str(target), (), device="cpu", threads=1, kv_cache_mib=16)
    report = await measure_on(spec, partial(start_services, groups=(group,)), measure)
    rows = {(row["contender"].removeprefix("coppice-on "), row["temperature"]): row for row in report["rows"]}
    names = ["coppice-off", "space", "space k=2 g=1"]
    assert list(rows) == [(name, temperature) for temperature in TEMPERATURES for name in names]
    assert all(row["identical"] and row["num_requests"] == 2 for row in rows.values())
    for temperature in TEMPERATURES:
        plain, one_group = rows["coppice-off", temperature], rows["space k=2 g=1", temperature]
        # A window without a prompt: plain passes have one row each, the others masks and the draft that came of them.
        # Metrics are read while passes run: of the first and the last pass, the rows may be counted and not the pass.
        assert plain["rows_per_pass"] == pytest.approx(1, abs=2.01 / plain["passes"])
        assert plain["redraft_rounds"] == plain["redraft_tokens"] == plain["masks_per_pass"] == 0
        assert one_group["redraft_rounds"] > 0
        # Of the first and the last pass of a window, the masks may be counted and not the pass.
        assert 0 < one_group["masks_per_pass"] <= 2 + 2 * 2 * one_group["num_requests"] / one_group["passes"]
        assert one_group["rows_per_pass"] > 1
    assert {"space/off", "space/off@T1", "space.tau"} <= set(report["ratios"])
