"""What drafters are compared in, what they are read to have counted, and what becomes of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest

from coppice.cli.topology import DrafterSpec
from coppice.completion import Speculation
from coppice.core.denoising import Denoising
from coppice.lab.bench.ablation import drafters
from coppice.lab.bench.ablation.drafters import (
    ablation_ratios,
    ablation_rows,
    broken_promises,
    calibration_error,
    make_groups,
    wrong_outputs,
)
from coppice.lab.bench.ablation.groups import PLAIN_DECODING, Group, Measured, Variant
from coppice.lab.bench.client import OFF
from coppice.lab.bench.counters import Counters, parse_counters
from coppice.lab.bench.harness.experiment import Ratios, Samples
from tests.unit.coppice.lab.bench.made_up import NOTHING, Named, sample

SMALL_LM, SEMI_AR, DIFFUSION = (DrafterSpec(kind, f"models/{kind}") for kind in ("small-lm", "semi-ar", "diffusion"))
NUM_TOKENS = 120
GRIDS = {"masks": (2, 4), "gammas": (4,), "denoising": (1, 3), "ahead": (8, 32), "contexts": (64,)}


def measured(
    group: str,
    taus: Mapping[tuple[str, float], Iterable[float]],
    readings: Mapping[str, Counters] | None = None,
    outputs: Mapping[str, int] | None = None,
    hits: Mapping[str, tuple[int, ...]] | None = None,
) -> Measured:
    """A group of variants with these τ by name and temperature, run by run, and speculation off; tokens/s are 100 τ.

    What is in `outputs` says another token than speculation off. `hits` are those of drafts made ahead, of ten outcomes
    that were expected.
    """
    named = {key: tuple(values) for key, values in taus.items()}
    num_runs = len(next(iter(named.values())))
    temperatures = tuple(dict.fromkeys(temperature for _, temperature in named))
    variants = {name: Variant(name, traversal=name.endswith("traversal")) for name, _ in named}
    named |= {(OFF, temperature): (1.0,) * num_runs for temperature in temperatures}
    samples = []
    for (name, temperature), values in named.items():
        for run, tau in enumerate(values):
            ahead = (hits or {}).get(name, ())
            counted = (readings or {}).get(name, NOTHING) if (run, temperature) == (0, temperatures[0]) else NOTHING
            one = sample(
                variants.get(name, PLAIN_DECODING).contender,
                NUM_TOKENS / tau / 100,
                run=run,
                temperature=temperature,
                tokens=((outputs or {}).get(name, 1),) * NUM_TOKENS,
                speculation=Speculation(
                    round(NUM_TOKENS / tau),
                    draft_ahead_hits_by_rank=ahead,
                    expected_outcomes=10 if ahead else 0,
                    outcomes_inside_expected=1 if ahead else 0,
                ),
                counted=counted,
            )
            samples.append(one)
    everyone = Group(group, tuple(variants.values()), temperatures)
    contenders = tuple(Named(variant.contender) for variant in everyone.everyone)
    return Measured(everyone, Samples(samples), contenders)


def ratios(*groups: Measured, kinds: tuple[str, ...] = ("small-lm",)) -> Ratios:
    return Ratios.of(ablation_ratios(groups, kinds))


def observed(nodes: float, expected: float, accepted: float) -> Counters:
    """What a drafter counted in one tenth of probability."""
    labels = (("probability", "0.5"), ("temperature", "0"))
    names = ("observed_nodes", "expected_acceptance", "accepted_nodes")
    values = zip(names, (nodes, expected, accepted), strict=True)
    return Counters({(f"coppice_drafter_{name}_total", labels): value for name, value in values})


def test_kinds_that_there_are_join_with_their_grids() -> None:
    groups = make_groups([SMALL_LM, SEMI_AR, DIFFUSION], (0.0, 1.0), 8, GRIDS)
    by_name = {group.name: group for group in groups}
    assert tuple(by_name) == drafters.PARTS
    names = {name: [variant.name for variant in group.variants] for name, group in by_name.items()}
    assert names["masks"] == ["semi-ar k=2", "semi-ar k=4"]
    assert names["gamma"] == [f"diffusion gamma=4 steps={n}" for n in (1, 3)]
    assert names["ahead"] == ["small-lm ahead=8", "small-lm ahead=32"]
    assert names["acceptance"] == ["small-lm tree", "small-lm traversal"]
    assert names["context"] == [f"{kind} context=64" for kind in ("small-lm", "semi-ar", "diffusion")]
    assert len(names["shape"]) == len(names["coupling"]) == 6
    assert by_name["coupling"].temperatures == by_name["acceptance"].temperatures == (1.0,)
    settings = {name: [dict(one.drafters[0].settings) for one in group.variants] for name, group in by_name.items()}
    assert settings["masks"] == [{"SEMI_AR_MASKS": "2"}, {"SEMI_AR_MASKS": "4"}]
    assert settings["ahead"] == [{"DRAFT_AHEAD": "on", "DRAFT_AHEAD_STEPS": steps} for steps in ("8", "32")]
    assert [one.denoising for one in by_name["gamma"].variants] == [Denoising(1, 4), Denoising(3, 4)]
    coupled, drawn = by_name["acceptance"].variants
    assert (coupled.drafters, coupled.traversal, drawn.traversal) == (drawn.drafters, False, True)
    one_kind = [group.name for group in make_groups([SMALL_LM], (0.0,), 8, {"masks": (2, 4), "gammas": (4, 8)})]
    assert one_kind == ["sources", "shape", "calibration"]


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
"""


def test_errors_of_two_tenths_do_not_cancel_out() -> None:
    counted = Counters(parse_counters(METRICS, {name for name, _ in observed(0, 0, 0).values}))
    assert calibration_error(counted) == pytest.approx((1.5 + 1.5) / 20)
    assert calibration_error(counted.plus(counted, -1)) is None


def test_ratios_are_of_tokens_per_round_within_a_run() -> None:
    taus = {"small-lm": (3.0, 4.0), "cache": (2.0, 5.0), "small-lm+cache": (4.0, 6.0), "planner": (3.0, 5.0)}
    sources = measured(drafters.SOURCES, {(name, 0.0): values for name, values in taus.items()})
    shape = measured(drafters.SHAPE, {("small-lm tree", 0.0): (4.0, 4.0), ("small-lm chain", 0.0): (3.0, 2.0)})
    found = ratios(sources, shape)
    assert (found.values["small-lm.tau"], found.values["cache.tau"]) == (3.5, 3.5)
    assert found.spread["merged/best-single"] == [1.2, 1.3333]
    assert found.spread["planner/best-single"] == [1.0, 1.0]
    assert found.values["merged.tau"] == found.values["small-lm+cache.tau"]
    assert found.spread["tree/chain"] == found.spread["tree/chain.small-lm"] == [1.3333, 2.0]
    assert found.spread["tree/chain.small-lm.tokens_per_s"] == [1.3333, 2.0]


def test_coupling_recovers_a_share_of_what_temperature_costs() -> None:
    sources = measured(drafters.SOURCES, dict.fromkeys((("small-lm", 0.0), ("cache", 0.0)), (4.0, 4.0)))
    taus = {("small-lm", 1.0): (3.0, 4.0), ("small-lm uncoupled", 1.0): (2.0, 2.0)}
    found = ratios(sources, measured(drafters.COUPLING, taus))
    assert found.spread["coupling-recovered@T1"] == found.spread["coupling-recovered.small-lm@T1"] == [0.5, 1.0]
    assert found.values["coupling-recovered@T1"] == 0.75
    level = {("small-lm", 1.0): (4.0, 4.0), ("small-lm uncoupled", 1.0): (4.0, 4.0)}
    assert "coupling-recovered@T1" not in ratios(sources, measured(drafters.COUPLING, level)).values


def test_hits_of_drafts_ahead_are_named_by_their_steps() -> None:
    taus = {("small-lm ahead=8", 0.0): (3.0,), ("small-lm ahead=32", 0.0): (3.0,)}
    one = measured(drafters.AHEAD, taus, hits={"small-lm ahead=8": (1, 2), "small-lm ahead=32": (5, 2)})
    assert ratios(one).values == {
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
        "semi-ar uncalibrated": NOTHING,
    }
    one = measured(drafters.CALIBRATION, dict.fromkeys(((name, 0.0) for name in readings), (2.0,)), readings)
    values = ratios(one, kinds=("small-lm", "semi-ar")).values
    assert values["calibration-error.small-lm"] == 0.01
    assert values["calibration-error"] == values["calibration-error.semi-ar"] == 0.05
    assert values["calibration-error-off"] == values["calibration-error-off.small-lm"] == 0.2
    assert "calibration-error-off.semi-ar" not in values
    [text] = broken_promises(values)
    assert "0.050" in text
    assert broken_promises({"calibration-error": 0.03}) == []
    row = {row["name"]: row for row in ablation_rows([one])}["calibration: coppice-on small-lm T=0"]
    assert (row["observed_nodes"], row["calibration_error"], row["identical"]) == (100, 0.01, True)


def test_every_other_token_is_a_mismatch_but_of_trees_that_are_drawn() -> None:
    same = measured(drafters.SHAPE, {("small-lm tree", 0.0): (2.0,)})
    changed = measured(drafters.SHAPE, {("small-lm tree", 0.0): (2.0,)}, outputs={"small-lm tree": 7})
    other_off = measured(drafters.COUPLING, {("small-lm", 0.0): (2.0,)}, outputs={OFF: 7, "small-lm": 1})
    drawn = measured(drafters.ACCEPTANCE, {("small-lm traversal", 1.0): (2.0,)}, outputs={"small-lm traversal": 7})
    assert wrong_outputs([same, drawn]) == []
    found = {row["contender"]: row["identical"] for row in ablation_rows([drawn])}
    assert found == {"coppice-on small-lm traversal": None, OFF: None}
    assert [text.split(" differs")[0] for text in wrong_outputs([same, changed])] == ["coppice-on small-lm tree"]
    # Speculation off says the same in every group.
    assert [text.split(" differs")[0] for text in wrong_outputs([same, other_off])] == [OFF]
