"""The value of each drafter, shape of tree and way to choose children, in turn with speculation off."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from coppice.cli.topology import DrafterSpec
from coppice.core.denoising import MAX_DENOISING_STEPS, Denoising
from coppice.lab.bench import comparison, figures
from coppice.lab.bench.ablation.groups import (
    FULL_TREES,
    DrafterSetting,
    Group,
    Measured,
    Services,
    Variant,
    contender_name,
    measure_groups,
)
from coppice.lab.bench.client import OFF, Meter
from coppice.lab.bench.comparison import Setup, short_name
from coppice.lab.bench.counters import Counters
from coppice.lab.bench.environment import describe_machine
from coppice.lab.bench.harness.experiment import ByRun, Ratios, at_temperature, known, over, quotient, rounded
from coppice.lab.bench.harness.plots import Panel, bars, depths
from coppice.lab.bench.harness.report import Report, Row, Shown, document, shown_path
from coppice.lab.bench.harness.tables import Table
from drafter_svc.drafters.kinds import SMALL_LMS
from orchestrator.prefix_cache.guesses import SOURCE as CACHE

SEMI_AR = "semi-ar"
DIFFUSION = "diffusion"

SOURCES = "sources"
SHAPE = "shape"
COUPLING = "coupling"
ACCEPTANCE = "acceptance"
CALIBRATION = "calibration"
MASKS = "masks"
GAMMA = "gamma"
AHEAD = "ahead"
CONTEXT = "context"

# Everything that is compared, in order.
PARTS = (SOURCES, SHAPE, COUPLING, ACCEPTANCE, CALIBRATION, MASKS, GAMMA, AHEAD, CONTEXT)

# The variant that leaves everything to the orchestrator.
PLANNER = "planner"

_PREFIX = "coppice_drafter_"
_DRAFTS = f"{_PREFIX}draft_seconds_count"
_DRAFT_S = f"{_PREFIX}draft_seconds_sum"
_OBSERVED = f"{_PREFIX}observed_nodes_total"
_EXPECTED = f"{_PREFIX}expected_acceptance_total"
_ACCEPTED = f"{_PREFIX}accepted_nodes_total"
_COUNTED = (_OBSERVED, _EXPECTED, _ACCEPTED)

# Expected and observed acceptance should differ by no more.
MOST_ERROR = 0.03
# Below this, temperature costs nothing that coupling could win back.
_LEAST_LOSS = 0.05


def make_groups(
    drafters: Sequence[DrafterSpec],
    temperatures: tuple[float, ...],
    num_nodes: int,
    grids: Mapping[str, tuple[int, ...]],
    parts: Collection[str] = PARTS,
    *,
    synchronous: bool = False,
) -> tuple[Group, ...]:
    """Those `parts` that these drafters, one of each kind, give to compare; none without temperatures.

    Rounds have at most `num_nodes` nodes. Synchronous ones have no planner: all of them are drafted for by all. Values
    of `grids` are tried one after another: `masks` of semi-ar drafters; `gammas`, tokens of diffusion blocks, each with
    all `denoising` steps; `ahead`, the most steps of a round that a small LM takes after likely outcomes; `contexts`,
    the most tokens of a sequence that are read.
    """
    everyone = tuple(map(DrafterSetting, drafters))
    # As deep as a chain of all nodes, where a drafter can.
    deep = (*FULL_TREES, ("DRAFT_STEPS", str(num_nodes)))
    found: dict[str, list[Variant]] = {part: [] for part in PARTS}
    for sources in combinations([spec.kind for spec in drafters]):
        found[SOURCES].append(Variant("+".join(sources), everyone, sources, has_cache=True))
    if not synchronous:
        found[SOURCES].append(Variant(PLANNER, everyone, has_cache=True))
    for spec in drafters:
        found[SHAPE] += _set(spec, "tree", *deep), _set(spec, "chain", *deep, ("DRAFT_CHILDREN", "1"))
        found[COUPLING] += _set(spec), _set(spec, "uncoupled", ("COUPLING", "off"))
        found[CALIBRATION] += _set(spec), _set(spec, "uncalibrated", ("ONLINE_CALIBRATION", "off"))
        for value in grids.get("contexts", ()):
            found[CONTEXT].append(_set(spec, f"context={value}", ("DRAFT_CONTEXT", str(value))))
        if spec.kind in SMALL_LMS:
            drawn = replace(_set(spec, "traversal", *FULL_TREES), traversal=True)
            found[ACCEPTANCE] += _set(spec, "tree", *FULL_TREES), drawn
            for value in grids.get("ahead", ()):
                steps = ("DRAFT_AHEAD_STEPS", str(value))
                found[AHEAD].append(_set(spec, f"ahead={value}", ("DRAFT_AHEAD", "on"), steps))
        if spec.kind == SEMI_AR:
            found[MASKS] += [_set(spec, f"k={n}", ("SEMI_AR_MASKS", str(n))) for n in grids.get("masks", ())]
        if spec.kind == DIFFUSION:
            drafter = DrafterSetting(spec, (("DIFFUSION_MAX_STEPS", str(MAX_DENOISING_STEPS)),))
            for gamma, count in itertools.product(grids.get("gammas", ()), grids.get("denoising", (1,))):
                name = f"{DIFFUSION} gamma={gamma} steps={count}"
                found[GAMMA].append(Variant(name, (drafter,), (DIFFUSION,), denoising=Denoising(count, gamma)))
    hot = tuple(value for value in temperatures if value > 0)
    groups = [
        Group(
            name,
            tuple(replace(one, synchronous=synchronous, most_nodes=num_nodes) for one in variants),
            hot if name in (COUPLING, ACCEPTANCE) else temperatures,
        )
        for name, variants in found.items()
    ]
    return tuple(group for group in groups if group.name in parts and group.variants and group.temperatures)


def combinations(kinds: Sequence[str]) -> list[tuple[str, ...]]:
    """Each kind and the cache alone, every pair, and all; the last one merges most."""
    names = (*kinds, CACHE)
    found = [*itertools.combinations(names, 1), *itertools.combinations(names, 2), names]
    return list(dict.fromkeys(found))


def _set(spec: DrafterSpec, name: str = "", *settings: tuple[str, str]) -> Variant:
    return Variant(f"{spec.kind} {name}".strip(), (DrafterSetting(spec, settings),), (spec.kind,))


def calibration_error(counted: Counters) -> float | None:
    """Mean difference of expected and observed acceptance over tenths of probability and classes of temperature."""
    return quotient(sum(abs(expected - accepted) for _, expected, accepted in _tenths(counted)), _observed(counted))


def chance_error(counted: Counters) -> float | None:
    """What that difference would be by chance, about, if every node were as likely as it was expected to be."""
    variances = (expected * max(0.0, 1 - expected / nodes) for nodes, expected, _ in _tenths(counted) if nodes)
    # The mean size of a normal deviate.
    return quotient(sum(math.sqrt(2 / math.pi * variance) for variance in variances), _observed(counted))


def _observed(counted: Counters) -> float:
    return counted.total(_OBSERVED)


def _tenths(counted: Counters) -> Iterator[tuple[float, float, float]]:
    """Nodes, expected and accepted ones, of every tenth of probability and class of temperature."""
    for labels in {labels for name, labels in counted.values if name == _OBSERVED}:
        nodes, expected, accepted = (counted.values.get((name, labels), 0.0) for name in _COUNTED)
        yield nodes, expected, accepted


async def measure_drafters(
    setup: Setup,
    drafters: Sequence[DrafterSpec],
    groups: Sequence[Group],
    num_nodes: int,
    rounds: str,
    services: Services,
) -> Report:
    """The report of drafters, a checkpoint of each kind; a round has at most `num_nodes` nodes.

    Raises BenchmarkError if the services failed, or a prompt does not fit the model.
    """
    machine = describe_machine()

    def meter(variant: Variant) -> Meter:
        urls = tuple(services.drafters[drafter].metrics_url for drafter in variant.asked)
        return Meter(urls, (_DRAFTS, _DRAFT_S, *_COUNTED), "a drafter")

    num_prompts = len(setup.prompts)
    taken, settings = await measure_groups("ablation", services, groups, setup, num_prompts, meter)
    rows = ablation_rows(taken)
    ratios = Ratios.of(ablation_ratios(taken, [one.kind for one in drafters]))
    settings |= {
        "drafters": {one.kind: shown_path(Path(one.model)) for one in drafters},
        "rounds": rounds,
        "num_nodes": num_nodes,
    }
    notes = [*comparison.remarks(rows), *broken_promises(ratios.values)]
    return document("ablation", machine, settings, rows, ratios, notes, wrong_outputs(taken), divergences=[])


def ablation_rows(measured: Sequence[Measured]) -> list[Row]:
    """The latency benchmark's row of each variant and temperature, and what its drafters counted."""
    return [_row(one, row) for one in measured for row in one.rows()]


def _row(measured: Measured, row: Row) -> Row:
    counted = measured.counted(row["contender"], row["temperature"])
    trees = round(counted.total(_DRAFTS))
    return {
        **row,
        "nodes_per_round": rounded(quotient(row["draft_tokens"], row["rounds"]), 4),
        "draft_ahead_hits": row["draft_ahead_hits"] if row["expected_outcomes"] else None,
        "trees": trees,
        "draft_ms": rounded(quotient(1000 * counted.total(_DRAFT_S), trees), 4),
        "observed_nodes": round(_observed(counted)),
        "calibration_error": rounded(calibration_error(counted), 4),
        "chance_error": rounded(chance_error(counted), 4),
        # Drawn trees follow the target's law and not its noise.
        **({"identical": None, "num_identical": None} if row["contender"] in _drawing([measured]) else {}),
    }


def wrong_outputs(measured: Sequence[Measured]) -> list[str]:
    """Outputs that are not those of speculation off in any group, but for those that are drawn."""
    return comparison.mismatches([sample for one in measured for sample in one.samples], _drawing(measured))


def _drawing(measured: Sequence[Measured]) -> frozenset[str]:
    """Contenders whose tokens follow the target's law and need not be those of speculation off."""
    return frozenset(variant.contender for one in measured for variant in one.group.variants if variant.traversal)


def ablation_ratios(measured: Sequence[Measured], kinds: Sequence[str]) -> ByRun:
    groups = {one.group.name: one for one in measured}
    found: ByRun = {}
    for name, ratios_of in (
        (SOURCES, _of_sources),
        (SHAPE, _of_shapes),
        (ACCEPTANCE, _of_acceptance),
        (AHEAD, _of_ahead),
        (CALIBRATION, _errors),
    ):
        if name in groups:
            found |= ratios_of(groups[name], kinds)
    if SOURCES in groups and COUPLING in groups:
        for temperature in groups[COUPLING].temperatures:
            shares = {kind: _recovered(groups[SOURCES], groups[COUPLING], kind, temperature) for kind in kinds}
            found |= _by_kind("coupling-recovered", "", temperature, shares)
    return found


# What is compared, by the ending of the ratio's name.
_FIGURES = {"": Measured.tau, ".tokens_per_s": Measured.speed}


def _of_shapes(measured: Measured, kinds: Sequence[str]) -> ByRun:
    found: ByRun = {}
    for temperature in measured.temperatures:
        for ending, figure in _FIGURES.items():
            values = {
                kind: over(*(figure(measured, f"{kind} {shape}", temperature) for shape in ("tree", "chain")))
                for kind in kinds
            }
            found |= _by_kind("tree/chain", ending, temperature, values)
    return found | _over_greedy(measured, {kind: f"{kind} tree" for kind in kinds}, ".full")


def _of_acceptance(measured: Measured, kinds: Sequence[str]) -> ByRun:
    return {
        at_temperature(f"coupled/traversal.{kind}", temperature): over(
            *(measured.tau(f"{kind} {name}", temperature) for name in ("tree", "traversal"))
        )
        for temperature in measured.temperatures
        for kind in SMALL_LMS
    }


def _of_ahead(measured: Measured, kinds: Sequence[str]) -> ByRun:
    hits = {"draft-ahead-hits": figures.draft_ahead_hits, "guessed-outcomes": figures.guessed_outcomes}
    return {
        at_temperature(f"{label}.{variant.name.replace(' ahead=', '.')}", temperature): known(
            measured.by_run(variant.name, temperature, figure)
        )
        for temperature in measured.temperatures
        for variant in measured.group.variants
        for label, figure in hits.items()
    }


def _over_greedy(measured: Measured, variants: Mapping[str, str], ending: str) -> ByRun:
    return {
        at_temperature(f"sampled/greedy.{kind}{ending}", temperature): over(
            measured.tau(variant, temperature), measured.tau(variant, 0.0)
        )
        for temperature in measured.temperatures
        if temperature > 0
        for kind, variant in variants.items()
    }


def _by_kind(label: str, ending: str, temperature: float, values: Mapping[str, list[float]]) -> ByRun:
    """A ratio of each kind of drafter, and without a kind that of the first."""
    first = next(iter(values))
    named = {f"{label}.{kind}{ending}": value for kind, value in values.items()} | {f"{label}{ending}": values[first]}
    return {at_temperature(name, temperature): value for name, value in named.items()}


def _of_sources(measured: Measured, kinds: Sequence[str]) -> ByRun:
    found: ByRun = {}
    *names, merged = ["+".join(sources) for sources in combinations(kinds)]
    singles = [*kinds, CACHE]
    for temperature in measured.temperatures:
        for label, name in [*zip(names, names, strict=True), (merged, merged), ("merged", merged)]:
            found[at_temperature(f"{label}.tau", temperature)] = known(measured.tau(name, temperature))
        plain = measured.speed(OFF, temperature)
        served = PLANNER if any(measured.speed(PLANNER, temperature)) else merged
        found[at_temperature("on/off", temperature)] = over(measured.speed(served, temperature), plain)
        for ending, figure in _FIGURES.items():
            by_single = [known(figure(measured, one, temperature)) for one in singles]
            best = [max(values) for values in zip(*by_single, strict=True)]
            for label, name in (("merged", merged), (PLANNER, PLANNER)):
                ratio = over(figure(measured, name, temperature), best)
                found[at_temperature(f"{label}/best-single{ending}", temperature)] = ratio
    return found | _over_greedy(measured, {kind: kind for kind in kinds}, "")


def _recovered(sources: Measured, coupling: Measured, kind: str, temperature: float) -> list[float]:
    greedy, coupled = known(sources.tau(kind, 0.0)), known(coupling.tau(kind, temperature))
    without = known(coupling.tau(f"{kind} uncoupled", temperature))
    runs = zip(greedy, coupled, without, strict=False)
    return [(on - off) / (cold - off) for cold, on, off in runs if cold - off >= _LEAST_LOSS]


def _errors(measured: Measured, kinds: Sequence[str]) -> ByRun:
    """Without a kind: that of the worst drafter."""
    found: ByRun = {}
    for ending, suffix, error in (
        ("", "", calibration_error),
        ("-off", " uncalibrated", calibration_error),
        ("-by-chance", "", chance_error),
    ):
        values = {kind: error(measured.counted(contender_name(f"{kind}{suffix}"))) for kind in kinds}
        here = {f"calibration-error{ending}.{kind}": [value] for kind, value in values.items() if value is not None}
        if here:
            found |= {**here, f"calibration-error{ending}": [max(value for [value] in here.values())]}
    return found


def broken_promises(values: Mapping[str, float]) -> list[str]:
    """A remark where the calibration error is larger than it should be."""
    error = values.get("calibration-error")
    if error is None or error <= MOST_ERROR:
        return []
    chance = values["calibration-error-by-chance"]
    return [
        f"calibration-error is {error:.3f}, more than the {MOST_ERROR} that it should be at most; chance alone "
        f"would show about {chance:.3f}."
    ]


SHOWN = Shown(
    tables=(
        Table(
            "in turn with speculation off",
            "temperature mean_acceptance_length nodes_per_round tokens_per_s speed_over_off draft_ms calibration_error "
            "acceptance_by_depth num_identical num_prompts",
            label=short_name,
            by="group",
        ),
    ),
    panels=(
        Panel(
            "τ",
            "mean_acceptance_length",
            lambda row: f"{row['group']}: {short_name(row)}",
            "T={temperature:g}",
            bars,
            where=lambda row: row["contender"] != OFF,
            has_base=True,
        ),
        Panel(
            "Sources alone: rounds that accepted this deep, of those drafted so deep",
            "acceptance_by_depth",
            series=lambda row: f"{short_name(row)} T={row['temperature']:g}",
            drawing=depths,
            where=lambda row: (
                row["group"] == SOURCES and "+" not in row["contender"] and short_name(row) not in (OFF, PLANNER)
            ),
            xlabel="depth in the tree",
        ),
    ),
    line="{num_prompts} prompts x {max_tokens} tokens x {num_runs} runs, {threads} threads, {rounds} rounds; "
    "at most {num_nodes} nodes a round. Repetition penalty {repetition_penalty:g}.",
)
