"""What is compared in the pass, what verifiers are read to have counted, and what becomes of it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from coppice.cli.topology import DrafterSpec
from coppice.completion import OriginCounts, Speculation
from coppice.lab.bench.ablation import in_pass
from coppice.lab.bench.ablation.groups import Group, Measured
from coppice.lab.bench.ablation.in_pass import (
    InPass,
    best_space,
    in_pass_ratios,
    in_pass_rows,
    make_groups,
    pruning_name,
)
from coppice.lab.bench.client import OFF
from coppice.lab.bench.comparison import mismatches
from coppice.lab.bench.counters import Counters
from coppice.lab.bench.harness.experiment import Ratios, Samples
from orchestrator.request.rounds import REDRAFT
from tests.unit.coppice.lab.bench.made_up import Named, sample

SMALL_LM = DrafterSpec("small-lm", "models/small-lm")
EVERYTHING = InPass(SMALL_LM, "/a", 3, "/h", (1, 2, 3, 5), (1, 2), (8, 16), (1, 4))
DRAFTING, PRUNING_1, PRUNING_4 = make_groups(EVERYTHING, (0.0,))
NUM_TOKENS = 120


@dataclass(frozen=True, slots=True)
class MadeUp:
    """A batch: tokens per round and per second, their id, rounds of re-drafts, and what the verifier counted."""

    tau: float = 1.0
    speed: float = 100.0
    token: int = 1
    redraft_rounds: int = 0
    passes: Counters = field(default_factory=Counters)


def counts(
    passes: float, pass_s: float, rows: float, nodes: float = 0, removed: float = 0, pruned: float = 0
) -> Counters:
    """What a verifier counted."""
    values = {in_pass.PASSES: passes, in_pass.PASS_S: pass_s, in_pass.ROWS: rows, in_pass.ROW_PASSES: passes}
    values |= {in_pass.NODES: nodes, in_pass.PRUNED_NODES: removed, in_pass.PRUNED_PASSES: pruned}
    return Counters({(name, ()): value for name, value in values.items()})


def compared(rows: float, whole_s: float, pruned_s: float) -> Counters:
    """What a verifier counted that ran passes of so many rows both ways."""
    values = {(in_pass.PRUNABLE_ROWS, "no"): rows, (in_pass.PRUNABLE_ROWS, "yes"): rows}
    values |= {(in_pass.PRUNABLE_S, "no"): whole_s, (in_pass.PRUNABLE_S, "yes"): pruned_s}
    return Counters({(name, (("pruned", pruned),)): value for (name, pruned), value in values.items()})


def measured(group: Group, batches: Mapping[str, Sequence[MadeUp]], temperatures: Sequence[float] = (0.0,)) -> Measured:
    """A group whose variants did this run by run, alike at all temperatures; the others did as plain decoding."""
    num_runs = max(map(len, batches.values()), default=1)
    samples = []
    for temperature, run in itertools.product(temperatures, range(num_runs)):
        for variant in group.everyone:
            done = batches.get(variant.name, [MadeUp()] * num_runs)[run]
            rounds = round(NUM_TOKENS / done.tau)
            origins = {REDRAFT: OriginCounts(done.redraft_rounds, 0, 0)} if done.redraft_rounds else {}
            one = sample(
                variant.contender,
                group.batch_size * NUM_TOKENS / done.speed,
                run=run,
                temperature=temperature,
                tokens=(done.token,) * NUM_TOKENS,
                size=group.batch_size,
                speculation=Speculation(rounds, rounds_drafted_by_depth=(rounds,), origins=origins),
                counted=done.passes,
            )
            samples.append(one)
    return Measured(group, Samples(samples), tuple(Named(variant.contender) for variant in group.everyone))


def ratios(*groups: Measured) -> Ratios:
    return Ratios.of(in_pass_ratios(groups, EVERYTHING))


def pruned(size: int, switch: str, source: str = REDRAFT) -> str:
    return pruning_name(source, size, switch)


def test_trees_that_are_pruned_differ_in_the_switch_alone_and_those_of_drafters_are_waited_for() -> None:
    assert [group.batch_size for group in (PRUNING_1, PRUNING_4)] == [1, 4]
    assert PRUNING_1.variants == PRUNING_4.variants
    for source, size in itertools.product((REDRAFT, "small-lm"), (8, 16)):
        four = [one for one in PRUNING_1.variants if (one.sources, one.max_nodes) == ((source,), size)]
        assert [dict(one.verifier.settings)["EARLY_PRUNING"] for one in four] == ["off", "on", "auto", "compare"]
        assert len({(one.drafters, one.sources, one.synchronous) for one in four}) == 1
        assert all(one.synchronous == (source != REDRAFT) for one in four)
        full = dict((four[0].drafters or (four[0].verifier,))[0].settings)
        assert full["DRAFT_MIN_PROBABILITY" if source != REDRAFT else "REDRAFT_MIN_PROBABILITY"] == "0"
    # All sizes of a switch are one deployment, and both sources share its verifier.
    assert len({variant.front for variant in PRUNING_1.everyone}) == 1 + 4 + 4
    assert len({variant.verifier for variant in PRUNING_1.everyone}) == 1 + 4
    # Trees of all sizes are within what the verifier drafts.
    assert dict(PRUNING_1.variants[-1].verifier.settings)["REDRAFT_NODES"] == "16"


def test_those_that_draft_for_themselves_are_compared_within_each_run() -> None:
    speeds = {"space k=2 g=1": (180, 120), "space+small-lm": (300, 300), "small-lm": (200, 150)}
    batches = {name: [MadeUp(2.0, speed) for speed in pair] for name, pair in speeds.items()}
    batches["space"] = [MadeUp(1.5, 110), MadeUp(2.5, 130)]
    one = measured(DRAFTING, batches)
    assert best_space(one, EVERYTHING, 0.0) == "space k=2 g=1"
    found = ratios(one)
    assert found.spread["space/off"] == [1.1, 1.3]
    assert found.spread["space.best/off"] == [1.2, 1.8]
    assert found.values["space.tau"] == 2.0
    assert found.spread["space+small-lm/small-lm"] == [1.5, 2.0]
    assert "rows-saved" not in found.values


def test_pruning_is_on_over_off_with_sizes_of_trees_together() -> None:
    drafting = measured(DRAFTING, {}, (0.0, 1.0))
    batches = {
        pruned(8, "off"): [MadeUp(4.0, passes=counts(2, 0.020, 20, nodes=16))],
        pruned(16, "off"): [MadeUp(4.0, passes=counts(2, 0.060, 36, nodes=32))],
        pruned(8, "on"): [MadeUp(4.0, passes=counts(2, 0.016, 20, nodes=16, removed=6, pruned=2))],
        pruned(16, "on"): [MadeUp(3.0, passes=counts(2, 0.024, 36, nodes=32, removed=18, pruned=2))],
        pruned(8, "auto"): [MadeUp(4.0, passes=counts(2, 0.020, 20, nodes=16))],
        pruned(16, "auto"): [MadeUp(4.0, passes=counts(2, 0.012, 36, nodes=32))],
        pruned(8, "compare"): [MadeUp(4.0, passes=compared(20, 0.020, 0.016))],
        pruned(16, "compare"): [MadeUp(4.0, passes=compared(36, 0.018, 0.0144))],
        pruned(8, "on", "small-lm"): [MadeUp(4.0, passes=counts(2, 0.02, 20, nodes=16, removed=4, pruned=2))],
        pruned(8, "off", "small-lm"): [MadeUp(5.0, passes=counts(2, 0.02, 20, nodes=16))],
    }
    values = ratios(drafting, measured(PRUNING_4, batches, (0.0, 1.0))).values
    assert values["rows-saved"] == values["rows-saved@T1"] == 0.5
    # 240 tokens in 60 rounds, and in 70.
    assert values["tau-kept"] == pytest.approx(6 / 7, abs=1e-4)
    # 1.0 and 0.5 ms for each row of whole passes, 0.8 and 0.4 of those between them.
    assert values["pruning.time-gain.b4"] == 1.25
    assert values["pruning.auto-gain.b4@T1"] == 2.5
    assert values["rows-saved.small-lm"] == 0.25
    assert "pruning.time-gain.b1" not in values
    # A size whose requests had no pass together makes no gain.
    batches[pruned(8, "compare")] = [MadeUp(4.0)]
    assert "pruning.time-gain.b4" not in ratios(drafting, measured(PRUNING_4, batches)).values


def test_rows_say_what_passes_were_where_drafts_came_from_and_every_other_token() -> None:
    batches = {
        "space": [MadeUp(2.0, 150.0, redraft_rounds=40, passes=counts(10, 0.1, 60))],
        OFF: [MadeUp(passes=counts(10, 0.05, 10))],
    }
    one = measured(DRAFTING, batches)
    found = {row["name"]: row for row in in_pass_rows([one])}
    space = found["drafting: coppice-on space T=0"]
    assert (space["redraft_rounds"], space["rounds"], space["rows_per_pass"], space["ms_per_pass"]) == (40, 60, 6, 10)
    assert (space["speed_over_off"], space["mean_acceptance_length"], space["identical"]) == (1.5, 2.0, True)
    assert found["drafting: coppice-off T=0"]["rows_per_pass"] == 1
    assert len(found) == len(DRAFTING.everyone)
    assert mismatches(one.samples) == []
    changed = measured(PRUNING_4, {pruned(8, "on"): [MadeUp(), MadeUp(token=7)]})
    wrong = mismatches([*one.samples, *changed.samples])
    assert [text.partition(" on prompt ")[2] for text in wrong] == [f"{number} (run 2)" for number in range(1, 5)]
    row = {row["name"]: row for row in in_pass_rows([one, changed])}[f"pruning b=4: coppice-on {pruned(8, 'on')} T=0"]
    assert (row["identical"], row["num_identical"], row["num_requests"]) == (False, 4, 8)
