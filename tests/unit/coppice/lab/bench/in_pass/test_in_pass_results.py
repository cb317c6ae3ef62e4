"""What is compared, what verifiers are read to have counted, and what becomes of it."""

from __future__ import annotations

import itertools

import pytest

from coppice.lab.bench.contenders import OFF, ON
from coppice.lab.bench.counters import Counters, parse_counters
from coppice.lab.bench.harness.experiment import Ratios
from coppice.lab.bench.in_pass import suite
from coppice.lab.bench.in_pass.suite import (
    Measured,
    batches_of,
    best_space,
    front_of,
    in_pass_ratios,
    in_pass_rows,
    pass_fields,
    wrong_outputs,
)
from coppice.lab.bench.in_pass.variants import InPass, make_groups, pruning_name
from orchestrator.request.rounds import REDRAFT
from tests.unit.coppice.lab.bench.in_pass.made_up import EVERYTHING, SMALL_LM, MadeUp, compared, counts, measured

DRAFTING, PRUNING_1, PRUNING_4 = make_groups(EVERYTHING)


def pruned(size: int, switch: str, source: str = REDRAFT) -> str:
    return f"{ON} {pruning_name(source, size, switch)}"


def test_trees_that_are_pruned_differ_in_the_switch_alone_and_those_of_drafters_are_waited_for() -> None:
    assert [group.batch_size for group in (PRUNING_1, PRUNING_4)] == [1, 4]
    assert PRUNING_1.variants == PRUNING_4.variants
    for source, size in itertools.product((REDRAFT, "small-lm"), (8, 16)):
        four = [one for one in PRUNING_1.variants if (one.sources, one.max_nodes) == ((source,), size)]
        assert [dict(one.verifier.settings)["EARLY_PRUNING"] for one in four] == ["off", "on", "auto", "compare"]
        assert len({(one.drafter, one.sources, one.synchronous) for one in four}) == 1
        assert all(one.synchronous == (source != REDRAFT) for one in four)
        full = dict(four[0].drafter.settings if four[0].drafter else four[0].verifier.settings)
        assert full["DRAFT_MIN_PROBABILITY" if source != REDRAFT else "REDRAFT_MIN_PROBABILITY"] == "0"
    # All sizes of a switch are one deployment, and both sources share its verifier.
    assert len({front_of(variant) for variant in PRUNING_1.variants}) == 1 + 4 + 4
    assert len({variant.verifier for variant in PRUNING_1.variants}) == 1 + 4
    # Trees of all sizes are within what the verifier drafts.
    assert dict(PRUNING_1.variants[-1].verifier.settings)["REDRAFT_NODES"] == "16"


def test_what_there_is_no_checkpoint_for_is_left_out() -> None:
    [drafting] = make_groups(InPass(SMALL_LM, "/a", 3))
    assert "space" in [variant.name for variant in drafting.variants]
    drafting, *pruning = make_groups(InPass(SMALL_LM, early_head="/h", tree_sizes=(8,), batch_sizes=(1, 4)))
    assert [variant.name for variant in drafting.variants] == ["", "small-lm"]
    assert len(pruning) == 2
    # Without an adapter there are the drafter's trees alone.
    assert {variant.sources for variant in pruning[0].variants} == {(), ("small-lm",)}
    assert not any("SPACE_ADAPTER" in dict(variant.verifier.settings) for variant in pruning[0].variants)


def test_batches_share_the_prompts_and_there_is_always_a_whole_one() -> None:
    assert batches_of(5, 1) == [range(at, at + 1) for at in range(5)]
    assert batches_of(5, 2) == [range(2), range(2, 4)]
    assert batches_of(5, 16) == [range(16)]


def test_counts_are_read_per_pass_and_those_of_an_older_verifier_have_no_pruning() -> None:
    reading = counts(4, 0.02, 40, nodes=36, removed=9, pruned=3)
    row = pass_fields(reading)
    assert (row["passes"], row["ms_per_pass"], row["rows_per_pass"]) == (4, 5.0, 10.0)
    assert (row["rows_left_per_pass"], row["removed_share"], row["pruned_passes"]) == (7.75, 0.25, 3)
    nothing = pass_fields(reading.plus(reading, -1))
    assert (nothing["ms_per_pass"], nothing["rows_left_per_pass"], nothing["removed_share"]) == (None, None, None)
    names = (suite.PASSES, suite.ROWS, suite.ROW_PASSES)
    page = "".join(f"{name} {n}\n" for name, n in zip(names, (2, 8, 2), strict=True))
    older = pass_fields(Counters(parse_counters(page, names)))
    assert (older["rows_per_pass"], older["rows_left_per_pass"], older["pruned_passes"]) == (4.0, 4.0, 0)


def test_those_that_draft_for_themselves_are_compared_within_each_run() -> None:
    speeds = {"space": (110, 130), "space k=2 g=1": (180, 120), "space+small-lm": (300, 300), "small-lm": (200, 150)}
    batches = {f"{ON} {name}": [MadeUp(2.0, speed) for speed in pair] for name, pair in speeds.items()}
    batches[f"{ON} space"] = [MadeUp(1.5, 110), MadeUp(2.5, 130)]
    one = measured(DRAFTING, batches)
    assert best_space(one, EVERYTHING, 0.0) == "space k=2 g=1"
    found = Ratios.of(in_pass_ratios([one], EVERYTHING))
    values, spread = found.values, found.spread
    assert spread["space/off"] == [1.1, 1.3]
    assert spread["space.best/off"] == [1.2, 1.8]
    assert values["space.tau"] == 2.0
    assert spread["space+small-lm/small-lm"] == [1.5, 2.0]
    assert "rows-saved" not in values


def test_pruning_is_on_over_off_with_sizes_of_trees_together() -> None:
    def group(one: Measured) -> list[Measured]:
        return [measured(DRAFTING, {}, (0.0, 1.0)), one]

    batches = {
        pruned(8, "off"): [MadeUp(4.0, passes=counts(2, 0.020, 20, nodes=16))],
        pruned(16, "off"): [MadeUp(4.0, passes=counts(2, 0.060, 36, nodes=32))],
        pruned(8, "on"): [MadeUp(4.0, passes=counts(2, 0.016, 20, nodes=16, removed=6, pruned=2))],
        pruned(16, "on"): [MadeUp(3.0, passes=counts(2, 0.024, 36, nodes=32, removed=18, pruned=2))],
        pruned(8, "auto"): [MadeUp(4.0, passes=counts(2, 0.020, 20, nodes=16))],
        pruned(16, "auto"): [MadeUp(4.0, passes=counts(2, 0.012, 36, nodes=32))],
        pruned(8, "compare"): [MadeUp(4.0, passes=compared(20, 0.020, 0.016))],
        pruned(16, "compare"): [MadeUp(4.0, passes=compared(36, 0.018, 0.0144))],
    }
    found = Ratios.of(in_pass_ratios(group(measured(PRUNING_4, batches, (0.0, 1.0))), EVERYTHING))
    values, _spread = found.values, found.spread
    assert values["rows-saved"] == values["rows-saved@T1"] == 0.5
    # 240 tokens in 60 rounds, and in 70.
    assert values["tau-kept"] == pytest.approx(6 / 7, abs=1e-4)
    # 1.0 and 0.5 ms for each row of whole passes, 0.8 and 0.4 of those between them.
    assert values["pruning.time-gain.b4"] == 1.25
    assert values["pruning.auto-gain.b4@T1"] == 2.5
    assert "pruning.time-gain.b1" not in values
    assert "rows-saved.small-lm" not in values
    drafters = {
        pruned(8, "on", "small-lm"): [MadeUp(4.0, passes=counts(2, 0.02, 20, nodes=16, removed=4, pruned=2))],
        pruned(8, "off", "small-lm"): [MadeUp(5.0, passes=counts(2, 0.02, 20, nodes=16))],
    }
    beside = Ratios.of(in_pass_ratios(group(measured(PRUNING_4, batches | drafters)), EVERYTHING)).values
    assert (beside["rows-saved"], beside["rows-saved.small-lm"]) == (0.5, 0.25)
    # A size whose requests had no pass together makes no gain.
    batches[pruned(8, "compare")] = [MadeUp(4.0)]
    assert (
        "pruning.time-gain.b4" not in Ratios.of(in_pass_ratios(group(measured(PRUNING_4, batches)), EVERYTHING)).values
    )


def test_rows_say_what_passes_were_and_where_drafts_came_from() -> None:
    batches = {
        f"{ON} space": [MadeUp(2.0, 150.0, redraft_rounds=40, passes=counts(10, 0.1, 60))],
        OFF: [MadeUp(passes=counts(10, 0.05, 10))],
    }
    found = {row["name"]: row for row in in_pass_rows([measured(DRAFTING, batches)])}
    space = found["drafting: coppice-on space T=0"]
    assert (space["redraft_rounds"], space["rounds"], space["rows_per_pass"], space["ms_per_pass"]) == (40, 60, 6, 10)
    assert (space["speed_over_off"], space["mean_acceptance_length"], space["identical"]) == (1.5, 2.0, True)
    assert found["drafting: coppice-off T=0"]["rows_per_pass"] == 1
    assert len(found) == len(DRAFTING.variants)


def test_every_other_token_is_a_mismatch_in_any_group_and_run() -> None:
    same = measured(DRAFTING, {f"{ON} space": [MadeUp(), MadeUp()]})
    assert wrong_outputs([same]) == []
    changed = measured(PRUNING_4, {pruned(8, "on"): [MadeUp(), MadeUp(token=7)]})
    found = wrong_outputs([same, changed])
    assert [(one.contender, one.run, one.prompt) for one in found] == [
        (pruned(8, "on"), 1, number) for number in range(4)
    ]
    other_off = measured(PRUNING_1, {OFF: [MadeUp(token=7)]})
    assert {one.contender for one in wrong_outputs([same, other_off])} == {OFF}
    row = {row["name"]: row for row in in_pass_rows([changed])}[f"pruning b=4: {pruned(8, 'on')} T=0"]
    assert (row["identical"], row["num_identical"], row["num_requests"]) == (False, 4, 8)
