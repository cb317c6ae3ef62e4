"""Named ratios of an ablation, each within a run where it compares, then the median over runs.

`SOURCES.tau` is τ of each combination, `merged/best-single` the τ of all sources together over the best of those
alone, `planner/best-single` that of requests that force nothing, `tree/chain.KIND` the τ of trees over that of chains
of as many nodes. `sampled/greedy.KIND` is the τ at a temperature over that at 0, `sampled/greedy.KIND.full` the same of
trees that are filled up, and `coupling-recovered.KIND` how much of what a temperature costs in τ without coupling it
wins back: (with - without) / (greedy - without).
`coupled/traversal.KIND` is the τ of trees with the request's noise over that of drawn trees of as many nodes.
`draft-ahead-hits.KIND.N` is the share of the rounds that a drafter was told to expect, with so many steps ahead, that
had a draft behind their outcome before it was known, `guessed-outcomes.KIND.N` that of the outcomes drafted for among
those that left the expected tree.
`calibration-error.KIND` is the mean difference of expected and observed acceptance, and ends in `-off` where trees are
sent with the drafter's own probabilities, in `-by-chance` where it is what so few nodes would show of none.
Without a kind: of the first drafter, and for the error the worst of all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from coppice.lab.bench import figures
from coppice.lab.bench.ablation.measure import Measured
from coppice.lab.bench.ablation.variants import (
    ACCEPTANCE,
    AHEAD,
    CALIBRATION,
    COUPLING,
    PLANNER,
    SHAPE,
    SOURCES,
    chain_name,
    combinations,
    combined,
    traversal_name,
    tree_name,
    uncalibrated_name,
    uncoupled_name,
)
from coppice.lab.bench.summary import ON, ratio_name
from drafter_svc.drafters.kinds import SMALL_LMS

RATIO_NOTE = (
    "medians over runs; plain names are T=0, '@T1' marks temperature 1. SOURCES.tau: tokens per round; "
    "merged/best-single: τ of all sources merged over that of the best one alone; planner/best-single: τ of requests "
    "that force nothing over it; tree/chain: τ at equal nodes; "
    "sampled/greedy: τ at a temperature over τ at 0, .full: of trees that are filled up; "
    "*.tokens_per_s: the same with tokens/s for τ; coupling-recovered: (τ with the request's noise - τ without) / "
    "(greedy τ - τ without); coupled/traversal: τ of trees with the request's noise over that of drawn trees of as "
    "many nodes; draft-ahead-hits: expected rounds with a draft behind their outcome before it was known, with "
    "so many steps; guessed-outcomes: of the outcomes that left the expected tree, those drafted for; "
    "calibration-error: mean |expected - observed| acceptance of nodes whose parent was "
    "committed, over tenths of probability, all runs and temperatures together, -off: with the drafter's own "
    "probabilities, -by-chance: about what so many nodes would show if there were none. "
    "Without a kind: the first drafter's, the worst drafter's for the error"
)

# Expected and observed acceptance should differ by no more.
MOST_ERROR = 0.03
# Below this, temperature costs nothing that coupling could win back.
_LEAST_LOSS = 0.05
# By name, a value for each run.
ByRun = dict[str, list[float]]


def ratios(measured: Sequence[Measured], kinds: Sequence[str]) -> tuple[dict[str, float], dict[str, list[float]]]:
    """The named ratios, and the smallest and largest value of each over the runs."""
    groups = {one.group.name: one for one in measured}
    by_run: ByRun = {}
    if (sources := groups.get(SOURCES)) is not None:
        by_run |= _of_sources(sources, kinds)
    if (shape := groups.get(SHAPE)) is not None:
        by_run |= _shapes(shape, kinds)
    for group, name_of, ending in ((sources, str, ""), (shape, tree_name, ".full")):
        if group is not None:
            by_run |= _over_greedy(group, {kind: name_of(kind) for kind in kinds}, ending)
    if sources is not None and (coupling := groups.get(COUPLING)) is not None:
        by_run |= _recovered(sources, coupling, kinds)
    if (acceptance := groups.get(ACCEPTANCE)) is not None:
        by_run |= _over_traversal(acceptance)
    if (ahead := groups.get(AHEAD)) is not None:
        by_run |= _ahead_hits(ahead)
    if (calibration := groups.get(CALIBRATION)) is not None:
        by_run |= _errors(calibration, kinds)
    middle = {name: round(median(values), 4) for name, values in by_run.items() if values}
    return middle, {name: [round(min(v), 4), round(max(v), 4)] for name, v in by_run.items() if v}


def _of_sources(measured: Measured, kinds: Sequence[str]) -> ByRun:
    found: ByRun = {}
    names = [combined(sources) for sources in combinations(kinds)]
    singles = [combined(sources) for sources in combinations(kinds) if len(sources) == 1]
    for temperature in measured.samples.temperatures:
        for name in names:
            found[ratio_name(f"{name}.tau", temperature)] = _tau(measured, name, temperature)
        for ending, figure in (("", _tau), (".tokens_per_s", _tokens_per_s)):
            best = [
                max(values) for values in zip(*[figure(measured, one, temperature) for one in singles], strict=True)
            ]
            for label, name in (("merged", names[-1]), (PLANNER, PLANNER)):
                ratio = _over(figure(measured, name, temperature), best)
                found[ratio_name(f"{label}/best-single{ending}", temperature)] = ratio
    return found


def _shapes(measured: Measured, kinds: Sequence[str]) -> ByRun:
    found: ByRun = {}
    for temperature in measured.samples.temperatures:
        for label, figure in (("tree/chain{}", _tau), ("tree/chain{}.tokens_per_s", _tokens_per_s)):
            for kind in kinds:
                pair = [figure(measured, name(kind), temperature) for name in (tree_name, chain_name)]
                found[ratio_name(label.format(f".{kind}"), temperature)] = _over(*pair)
            first = found[ratio_name(label.format(f".{kinds[0]}"), temperature)]
            found[ratio_name(label.format(""), temperature)] = first
    return found


def _over_greedy(measured: Measured, variants: Mapping[str, str], ending: str) -> ByRun:
    found: ByRun = {}
    for temperature in measured.samples.temperatures:
        for kind, variant in variants.items():
            if temperature > 0:
                pair = _tau(measured, variant, temperature), _tau(measured, variant, 0.0)
                found[ratio_name(f"sampled/greedy.{kind}{ending}", temperature)] = _over(*pair)
    return found


def _recovered(sources: Measured, coupling: Measured, kinds: Sequence[str]) -> ByRun:
    found: ByRun = {}
    for temperature in coupling.samples.temperatures:
        for kind in kinds:
            greedy = _tau(sources, kind, 0.0)
            without = _tau(coupling, uncoupled_name(kind), temperature)
            runs = zip(greedy, _tau(coupling, kind, temperature), without, strict=False)
            shares = [(on - off) / (cold - off) for cold, on, off in runs if cold - off >= _LEAST_LOSS]
            found[ratio_name(f"coupling-recovered.{kind}", temperature)] = shares
        first = found[ratio_name(f"coupling-recovered.{kinds[0]}", temperature)]
        found[ratio_name("coupling-recovered", temperature)] = first
    return found


def _over_traversal(measured: Measured) -> ByRun:
    found: ByRun = {}
    for temperature in measured.samples.temperatures:
        for kind in SMALL_LMS:
            pair = [_tau(measured, name(kind), temperature) for name in (tree_name, traversal_name)]
            found[ratio_name(f"coupled/traversal.{kind}", temperature)] = _over(*pair)
    return found


def _ahead_hits(measured: Measured) -> ByRun:
    found: ByRun = {}
    for temperature in measured.samples.temperatures:
        for variant in measured.group.variants:
            samples = measured.samples.of(variant.contender, temperature)
            name = variant.name.replace(" ahead=", ".")
            for label, figure in (
                ("draft-ahead-hits", figures.draft_ahead_hits),
                ("guessed-outcomes", figures.guessed_outcomes),
            ):
                found[ratio_name(f"{label}.{name}", temperature)] = figures.by_run(samples, figure)
    return found


def _errors(measured: Measured, kinds: Sequence[str]) -> ByRun:
    found: ByRun = {}
    for ending, name in (("", str), ("-off", uncalibrated_name), ("-by-chance", str)):
        label = f"calibration-error{ending}"
        for kind in kinds:
            reading = measured.readings_of(f"{ON} {name(kind)}")
            error = reading.chance_error if ending == "-by-chance" else reading.calibration_error
            if error is not None:
                found[f"{label}.{kind}"] = [error]
        if values := [found[f"{label}.{kind}"][0] for kind in kinds if f"{label}.{kind}" in found]:
            found[label] = [max(values)]
    return found


def broken_promises(values: Mapping[str, float]) -> list[str]:
    """What has to be said of figures that miss what was promised."""
    error = values.get("calibration-error")
    if error is None or error <= MOST_ERROR:
        return []
    chance = values["calibration-error-by-chance"]
    return [
        f"calibration-error is {error:.3f}, more than the {MOST_ERROR} that it should be at most; chance alone "
        f"would show about {chance:.3f}."
    ]


def _tau(measured: Measured, variant: str, temperature: float) -> list[float]:
    samples = measured.samples.of(f"{ON} {variant}", temperature)
    return figures.by_run(samples, figures.mean_acceptance_length)


def _tokens_per_s(measured: Measured, variant: str, temperature: float) -> list[float]:
    return figures.by_run(measured.samples.of(f"{ON} {variant}", temperature), figures.tokens_per_s)


def _over(first: Sequence[float], second: Sequence[float]) -> list[float]:
    return [mine / theirs for mine, theirs in zip(first, second, strict=False) if theirs]
