"""What is compared, what drafters are read to have counted, and what becomes of it."""

from __future__ import annotations

import pytest

from coppice.cli.topology import DrafterSpec
from coppice.core.denoising import Denoising
from coppice.lab.bench.ablation import variants
from coppice.lab.bench.ablation.suite import (
    ablation_ratios,
    ablation_rows,
    broken_promises,
    calibration_error,
    differing_offs,
    wrong_outputs,
)
from coppice.lab.bench.ablation.variants import Grids, make_groups
from coppice.lab.bench.counters import Counters, parse_counters
from coppice.lab.bench.harness.experiment import Ratios
from tests.unit.coppice.lab.bench.ablation.made_up import DIFFUSION, SEMI_AR, SMALL_LM, measured, observed


def test_one_drafter_has_no_grids_and_greedy_requests_no_coupling() -> None:
    groups = make_groups([SMALL_LM], (0.0, 1.0), 8, Grids((2, 4), (4, 8)))
    assert [group.name for group in groups] == ["sources", "shape", "coupling", "acceptance", "calibration"]
    temperatures = {group.name: group.temperatures for group in groups}
    assert temperatures["coupling"] == temperatures["acceptance"] == (1.0,)
    assert "coupling" not in [group.name for group in make_groups([SMALL_LM], (0.0,), 8, Grids())]


def test_kinds_that_there_are_join_with_their_grids() -> None:
    groups = make_groups([SMALL_LM, SEMI_AR, DIFFUSION], (0.0, 1.0), 8, Grids((2, 4), (4,), (1, 3), (8, 32), (64,)))
    by_name = {group.name: group for group in groups}
    assert [one.name for one in by_name["masks"].variants] == ["semi-ar k=2", "semi-ar k=4"]
    assert [one.name for one in by_name["gamma"].variants] == [f"diffusion gamma=4 steps={n}" for n in (1, 3)]
    assert [one.name for one in by_name["ahead"].variants] == ["small-lm ahead=8", "small-lm ahead=32"]
    settings = {name: [dict(one.drafters[0].settings) for one in group.variants] for name, group in by_name.items()}
    assert settings["masks"] == [{"SEMI_AR_MASKS": "2"}, {"SEMI_AR_MASKS": "4"}]
    assert [one.denoising for one in by_name["gamma"].variants] == [Denoising(1, 4), Denoising(3, 4)]
    assert len({one.drafters for one in by_name["gamma"].variants}) == 1
    assert [one.name for one in by_name["context"].variants] == [
        f"{kind} context=64" for kind in ("small-lm", "semi-ar", "diffusion")
    ]
    assert settings["context"] == [{"DRAFT_CONTEXT": "64"}] * 3
    assert settings["ahead"] == [{"DRAFT_AHEAD": "on", "DRAFT_AHEAD_STEPS": steps} for steps in ("8", "32")]
    assert len(by_name["shape"].variants) == len(by_name["coupling"].variants) == 6


def test_drawn_trees_are_those_of_small_lms_and_of_the_drafters_of_coupled_ones() -> None:
    drafters = [SMALL_LM, SEMI_AR, DrafterSpec("boost-1", "models/boost-1")]
    [group] = make_groups(drafters, (0.0, 0.7), 8, Grids(), ["acceptance"])
    assert group.temperatures == (0.7,)
    names = ["small-lm tree", "small-lm traversal", "boost-1 tree", "boost-1 traversal"]
    assert [(one.name, one.traversal) for one in group.variants] == [(name, "traversal" in name) for name in names]
    coupled, drawn = group.variants[:2]
    assert coupled.drafters == drawn.drafters


def test_combinations_share_an_orchestrator_and_requests_ask_only_whom_they_name() -> None:
    sources = make_groups([SMALL_LM, SEMI_AR], (0.0,), 8, Grids())[0]
    assert len({(variant.drafters, variant.has_cache) for variant in sources.variants}) == 1
    asked = {variant.name: [one.spec.kind for one in variant.asked] for variant in sources.variants}
    assert asked["cache"] == []
    assert asked["semi-ar+cache"] == ["semi-ar"]
    assert asked["planner"] == ["small-lm", "semi-ar"]
    assert [variant.name for variant in sources.variants if not variant.sources] == ["planner"]
    waiting = make_groups([SMALL_LM, SEMI_AR], (0.0,), 8, Grids(), has_planner=False)[0]
    assert waiting.variants == sources.variants[:-1]


METRICS = """\
# TYPE coppice_drafter_observed_nodes_total counter
coppice_drafter_observed_nodes_total{probability="0.5",temperature="0"} 10.0
coppice_drafter_observed_nodes_total{probability="0.9",temperature="above_0.85"} 10.0
# TYPE coppice_drafter_expected_acceptance_total counter
coppice_drafter_expected_acceptance_total{probability="0.5",temperature="0"} 5.5
coppice_drafter_expected_acceptance_total{probability="0.9",temperature="above_0.85"} 9.5
# TYPE coppice_drafter_accepted_nodes_total counter
coppice_drafter_accepted_nodes_total{probability="0.5",temperature="0"} 7.0
coppice_drafter_accepted_nodes_total{probability="0.9",temperature="above_0.85"} 8.0
# TYPE coppice_drafter_draft_seconds histogram
coppice_drafter_draft_seconds_bucket{le="+Inf"} 4.0
coppice_drafter_draft_seconds_count 4.0
coppice_drafter_draft_seconds_sum 0.008
# TYPE coppice_drafter_sequences gauge
coppice_drafter_sequences 1.0
"""


def test_errors_of_two_tenths_do_not_cancel_out() -> None:
    names = {line.split()[2] + "_total" for line in METRICS.splitlines() if line.endswith("counter")}
    names = {name.replace("_total_total", "_total") for name in names}
    counted = Counters(parse_counters(METRICS, names))
    assert calibration_error(counted) == pytest.approx((1.5 + 1.5) / 20)
    assert calibration_error(counted.plus(counted, -1)) is None


def test_ratios_are_of_tokens_per_round_within_a_run() -> None:
    sources = measured(
        variants.SOURCES,
        {
            ("small-lm", 0.0): (3.0, 4.0),
            ("cache", 0.0): (2.0, 5.0),
            ("small-lm+cache", 0.0): (4.0, 6.0),
            ("planner", 0.0): (3.0, 5.0),
        },
    )
    shape = measured(variants.SHAPE, {("small-lm tree", 0.0): (4.0, 4.0), ("small-lm chain", 0.0): (3.0, 2.0)})
    found = Ratios.of(ablation_ratios([sources, shape], ["small-lm"]))
    values, spread = found.values, found.spread
    assert (values["small-lm.tau"], values["cache.tau"]) == (3.5, 3.5)
    assert spread["merged/best-single"] == [1.2, 1.3333]
    assert spread["planner/best-single"] == [1.0, 1.0]
    assert spread["tree/chain"] == spread["tree/chain.small-lm"] == [1.3333, 2.0]
    assert spread["tree/chain.small-lm.tokens_per_s"] == [1.3333, 2.0]


def test_what_is_left_at_a_temperature_is_of_greedy_rounds_in_the_same_run() -> None:
    sources = measured(
        variants.SOURCES,
        {
            (name, temperature): taus
            for name in ("small-lm", "cache", "small-lm+cache")
            for temperature, taus in ((0.0, (4.0, 6.0)), (1.0, (3.0, 3.0)))
        },
    )
    shape = measured(
        variants.SHAPE,
        {
            ("small-lm tree", 0.0): (5.0,),
            ("small-lm chain", 0.0): (3.0,),
            ("small-lm tree", 1.0): (4.0,),
            ("small-lm chain", 1.0): (2.0,),
        },
    )
    found = Ratios.of(ablation_ratios([sources, shape], ["small-lm"]))
    values, spread = found.values, found.spread
    assert spread["sampled/greedy.small-lm@T1"] == [0.5, 0.75]
    assert values["sampled/greedy.small-lm.full@T1"] == 0.8
    assert "sampled/greedy.small-lm" not in values


def test_coupling_recovers_a_share_of_what_temperature_costs() -> None:
    sources = measured(variants.SOURCES, dict.fromkeys((("small-lm", 0.0), ("cache", 0.0)), (4.0, 4.0)))
    taus = {("small-lm", 1.0): (3.0, 4.0), ("small-lm uncoupled", 1.0): (2.0, 2.0)}
    found = Ratios.of(ablation_ratios([sources, measured(variants.COUPLING, taus)], ["small-lm"]))
    values, spread = found.values, found.spread
    assert spread["coupling-recovered@T1"] == spread["coupling-recovered.small-lm@T1"] == [0.5, 1.0]
    assert values["coupling-recovered@T1"] == 0.75
    level = {("small-lm", 1.0): (4.0, 4.0), ("small-lm uncoupled", 1.0): (4.0, 4.0)}
    assert (
        "coupling-recovered@T1"
        not in Ratios.of(ablation_ratios([sources, measured(variants.COUPLING, level)], ["small-lm"])).values
    )


def test_hits_of_drafts_ahead_are_named_by_their_steps() -> None:
    taus = {("small-lm ahead=8", 0.0): (3.0,), ("small-lm ahead=32", 0.0): (3.0,)}
    hits = {"coppice-on small-lm ahead=8": (1, 2), "coppice-on small-lm ahead=32": (5, 2)}
    one = measured(variants.AHEAD, taus, hits=hits)
    found = Ratios.of(ablation_ratios([one], ["small-lm"]))
    values, _spread = found.values, found.spread
    assert values == {
        "draft-ahead-hits.small-lm.8": 0.4,
        "guessed-outcomes.small-lm.8": 0.3333,
        "draft-ahead-hits.small-lm.32": 0.8,
        "guessed-outcomes.small-lm.32": 0.7778,
    }
    by_name = {row["name"]: row["draft_ahead_hits"] for row in ablation_rows([one])}
    assert by_name["ahead: coppice-on small-lm ahead=32 T=0"] == 0.8
    assert by_name["ahead: coppice-off T=0"] is None


def test_the_calibration_error_is_that_of_the_worst_drafter() -> None:
    readings = {
        "small-lm": observed(100, 60, 59),
        "small-lm uncalibrated": observed(100, 60, 40),
        "semi-ar": observed(100, 50, 45),
        "semi-ar uncalibrated": Counters(),
    }
    taus = dict.fromkeys(((name, 0.0) for name in readings), (2.0,))
    found = Ratios.of(ablation_ratios([measured(variants.CALIBRATION, taus, readings)], ["small-lm", "semi-ar"]))
    values, _spread = found.values, found.spread
    assert values["calibration-error.small-lm"] == 0.01
    assert values["calibration-error"] == values["calibration-error.semi-ar"] == 0.05
    assert values["calibration-error-off"] == values["calibration-error-off.small-lm"] == 0.2
    assert "calibration-error-off.semi-ar" not in values
    [text] = broken_promises(values)
    assert "0.050" in text
    assert broken_promises({"calibration-error": 0.03}) == []


def test_rows_name_their_group_and_carry_what_was_counted() -> None:
    one = measured(variants.SHAPE, {("small-lm tree", 0.0): (2.0,)}, {"small-lm tree": observed(10, 5, 4)})
    found = {row["name"]: row for row in ablation_rows([one])}
    assert set(found) == {"shape: coppice-on small-lm tree T=0", "shape: coppice-off T=0"}
    tree = found["shape: coppice-on small-lm tree T=0"]
    assert (tree["observed_nodes"], tree["calibration_error"], tree["identical"]) == (10, 0.1, True)


def test_every_other_token_is_a_mismatch() -> None:
    same = measured(variants.SHAPE, {("small-lm tree", 0.0): (2.0,)})
    changed = measured(variants.SHAPE, {("small-lm tree", 0.0): (2.0,)}, outputs={"coppice-on small-lm tree": 7})
    other_off = measured(variants.COUPLING, {("small-lm", 0.0): (2.0,)}, outputs={"coppice-off": 7})
    drawn = measured(
        variants.ACCEPTANCE, {("small-lm traversal", 1.0): (2.0,)}, outputs={"coppice-on small-lm traversal": 7}
    )
    assert wrong_outputs([same, drawn]) == []
    found = {row["contender"]: row["identical"] for row in ablation_rows([drawn])}
    assert found == {"coppice-on small-lm traversal": None, "coppice-off": None}
    assert [one.contender for one in wrong_outputs([same, changed])] == ["coppice-on small-lm tree"]
    assert differing_offs([same, changed]) == []
    assert [one.reference for one in differing_offs([same, other_off])] == ["coppice-off"]
