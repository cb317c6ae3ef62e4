"""The ablation of drafters: which drafter, shape of tree or way to choose children is worth what.

Every group of variants takes turns with speculation off. `RATIO_NOTE` says what each named ratio is.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc

from coppice.cli.topology import DrafterSpec, Topology
from coppice.core.denoising import LEFT_TO_DRAFTER
from coppice.lab.bench import figures
from coppice.lab.bench.ablation.variants import (
    ACCEPTANCE,
    AHEAD,
    CALIBRATION,
    COUPLING,
    PLANNER,
    SHAPE,
    SOURCES,
    DrafterSetting,
    Group,
    Variant,
    chain_name,
    combinations,
    combined,
    traversal_name,
    tree_name,
    uncalibrated_name,
    uncoupled_name,
)
from coppice.lab.bench.contenders import (
    OFF,
    ON,
    AcceptanceRule,
    Completion,
    Contender,
    CoppiceContender,
    Mode,
    Task,
    max_context,
)
from coppice.lab.bench.counters import Counters, read_counters
from coppice.lab.bench.environment import describe_machine
from coppice.lab.bench.harness.experiment import ByRun, Ratios, Samples, at_temperature, known, over, progress, rounded
from coppice.lab.bench.harness.plots import Panel, bars, depths
from coppice.lab.bench.harness.report import Report, Row, Shown, document, shown_path
from coppice.lab.bench.harness.tables import Table
from coppice.lab.bench.latency import (
    Mismatch,
    Plan,
    Sample,
    depth_cell,
    figure_by_run,
    latency_rows,
    measure,
    mismatches,
    outputs,
    prompt_settings,
    remarks,
)
from coppice.lab.bench.prompts import Prompt, encoded_prompts
from coppice.lab.bench.services import Metered, start_metered
from drafter_svc.drafters.kinds import SMALL_LMS

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
RATIO_NOTE = (
    "medians over runs; plain names are T=0, '@T1' marks temperature 1. SOURCES.tau: tokens per round; "
    "merged/best-single: τ of all sources merged over that of the best one alone; planner/best-single: τ of requests "
    "that force nothing over it; tree/chain: τ at equal nodes; "
    "sampled/greedy: τ at a temperature over τ at 0, .full: of trees that are filled up; "
    "*.tokens_per_s: the same with tokens/s for τ; coupling-recovered: (τ with the request's noise - τ without) / "
    "(greedy τ - τ without); coupled/traversal: τ of trees with the request's noise over that of drawn trees of as "
    "many nodes; draft-ahead-hits: expected rounds with a draft for their outcome before it was known, with "
    "so many steps; guessed-outcomes: of the outcomes that left the expected tree, those drafted for; "
    "calibration-error: mean |expected - observed| acceptance of nodes whose parent was "
    "committed, over tenths of probability, all runs and temperatures together, -off: with the drafter's own "
    "probabilities, -by-chance: about what so many nodes would show if there were none. "
    "Without a kind: the first drafter's, the worst drafter's for the error"
)
# What is compared, by the ending of the ratio's name.
_FIGURES: Mapping[str, figures.Figure] = {
    "": figures.mean_acceptance_length,
    ".tokens_per_s": figures.tokens_per_s,
}
NOTES = (
    "One request at a time, each forced to speculate with the sources that it names and the fixed plan, but for those "
    "of the planner, which force nothing. Every call has a cache_salt of its own: the cache knows no more than the "
    "request's own text.",
    "draft_ms: of a variant's drafters together, a tree each, prompts included. What a drafter has learned about its "
    "acceptance it keeps from group to group, as it would in service.",
)

# An orchestrator: its drafters, and whether it has a cache of its own.
Front = tuple[tuple[DrafterSetting, ...], bool]


@dataclass(frozen=True, slots=True)
class Services:
    """One verifier, a drafter process for every setting, and an orchestrator for every set of drafters."""

    # For speculation off.
    plain: str
    fronts: Mapping[Front, str]
    drafters: Mapping[DrafterSetting, Metered]

    def address(self, variant: Variant) -> str:
        """The orchestrator that serves a variant."""
        return self.fronts[variant.drafters, variant.has_cache]


async def start_services(topology: Topology, groups: Sequence[Group], env: Mapping[str, str]) -> Services:
    """Start what the groups need; `env` is of every orchestrator. Drafters one by one: each compiles on its own."""
    await topology.start()
    variants = [variant for group in groups for variant in group.variants]
    drafters: dict[DrafterSetting, Metered] = {}
    for setting in dict.fromkeys(drafter for variant in variants for drafter in variant.drafters):
        name = " ".join(["drafter", setting.spec.kind, *(f"{key}={value}" for key, value in setting.settings)])
        drafters[setting] = await start_metered(
            lambda own, name=name, setting=setting: topology.add_drafter(name, setting.spec, own),  # type: ignore[misc]
            dict(setting.settings),
        )
    fronts: dict[Front, str] = {}
    for of_front, has_cache in dict.fromkeys((variant.drafters, variant.has_cache) for variant in variants):
        own = {
            "DRAFTER_ADDRESSES": ",".join(drafters[drafter].address for drafter in of_front),
            "CACHE_DRAFTER": "true" if has_cache else "false",
        }
        name = f"orchestrator {len(fronts) + 1}"
        fronts[of_front, has_cache] = await topology.add_orchestrator(name, {**own, **env})
    return Services(topology.address, fronts, drafters)


class MeteredContender:
    """A contender whose drafters' counts are read before and after every completion, outside of its time."""

    def __init__(self, contender: Contender, urls: Sequence[str]) -> None:
        """`urls` are those of the metrics of its drafters."""
        self.name, self.note = contender.name, contender.note
        self._contender, self._urls = contender, tuple(urls)

    def complete(self, task: Task) -> Completion:
        """Complete one task; what drafters counted meanwhile is `counted` of the completion.

        Raises:
            BenchmarkError: the call failed, or the metrics cannot be had.
        """
        before = self._read()
        completion = self._contender.complete(task)
        return replace(completion, counted=self._read().plus(before, -1))

    def _read(self) -> Counters:
        names = (_DRAFTS, _DRAFT_S, *_COUNTED)
        return sum_of(Counters(read_counters(url, names, "a drafter")) for url in self._urls)


def sum_of(counters: Iterator[Counters] | Sequence[Counters]) -> Counters:
    """All of them added up."""
    total = Counters()
    for one in counters:
        total = total.plus(one)
    return total


def calibration_error(counted: Counters) -> float | None:
    """Mean difference of expected and observed acceptance over tenths of probability and classes of temperature."""
    apart = sum(abs(expected - accepted) for _, expected, accepted in _tenths(counted))
    return apart / counted.total(_OBSERVED) if counted.total(_OBSERVED) else None


def chance_error(counted: Counters) -> float | None:
    """What that difference would be by chance, about, if every node were as likely as it was expected to be."""
    variances = (expected * max(0.0, 1 - expected / nodes) for nodes, expected, _ in _tenths(counted) if nodes)
    # The mean size of a normal deviate.
    apart = sum(math.sqrt(2 / math.pi * variance) for variance in variances)
    return apart / counted.total(_OBSERVED) if counted.total(_OBSERVED) else None


def _tenths(counted: Counters) -> Iterator[tuple[float, float, float]]:
    """Nodes, expected and accepted ones, of every tenth of probability and class of temperature."""
    for labels in {labels for name, labels in counted.values if name == _OBSERVED}:
        nodes, expected, accepted = (counted.values.get((name, labels), 0.0) for name in _COUNTED)
        yield nodes, expected, accepted


@dataclass(frozen=True, slots=True)
class Measured:
    """A group and its samples."""

    group: Group
    samples: Samples[Sample]
    contenders: tuple[Contender, ...]

    @property
    def drawing(self) -> frozenset[str]:
        """Contenders whose tokens follow the target's law and need not be those of speculation off."""
        return frozenset(variant.contender for variant in self.group.variants if variant.traversal)

    def counted(self, contender: str, temperature: float | None = None) -> Counters:
        """What a contender's drafters counted, at one temperature or at all of them."""
        chosen = self.samples.where(contender=contender)
        return sum_of(
            [
                one.completion.counted
                for one in chosen
                if one.completion.counted is not None and temperature in (None, one.temperature)
            ]
        )

    def by_run(self, variant: str, temperature: float, figure: figures.Figure) -> list[float | None]:
        """A figure of a variant's completions in each run."""
        return figure_by_run(self.samples, f"{ON} {variant}", temperature, figure)

    def tau(self, variant: str, temperature: float) -> list[float | None]:
        """Tokens per round in each run."""
        return self.by_run(variant, temperature, figures.mean_acceptance_length)


@dataclass(frozen=True, slots=True)
class AblationSuite:
    """One ablation of drafters, a checkpoint of each kind, of one target."""

    target: Path
    drafters: tuple[DrafterSpec, ...]
    groups: tuple[Group, ...]
    prompts: tuple[Prompt, ...]
    plan: Plan
    num_nodes: int
    rounds: str
    threads: int

    async def start(self, topology: Topology) -> Services:
        """Start the services."""
        return await start_services(topology, self.groups, {"ROUNDS": self.rounds, "MAX_NODES": str(self.num_nodes)})

    def run(self, services: Services) -> Report:
        """Measure and return the report.

        Raises:
            BenchmarkError: the services failed, or a prompt does not fit the model.
        """
        machine = describe_machine()
        context = max_context(services.plain)
        prompt_ids, num_cut = encoded_prompts(self.target, self.prompts, self.plan.max_tokens, context)
        each = len(self.prompts) * self.plan.num_runs
        total = sum((1 + len(group.variants)) * each * len(group.temperatures) for group in self.groups)
        with progress("ablation", total) as advance:
            taken = [self._measure(services, group, prompt_ids, advance) for group in self.groups]
        rows = ablation_rows(taken)
        ratios = Ratios.of(ablation_ratios(taken, [one.kind for one in self.drafters]))
        settings = {
            "target": shown_path(self.target),
            "drafters": {one.kind: shown_path(Path(one.model)) for one in self.drafters},
            "rounds": self.rounds,
            "threads": self.threads,
            "num_runs": self.plan.num_runs,
            "max_tokens": self.plan.max_tokens,
            "temperatures": list(self.plan.temperatures),
            "seed": self.plan.seed,
            "repetition_penalty": self.plan.repetition_penalty,
            # Of a round's tree, or chain, at most.
            "num_nodes": self.num_nodes,
            "prompts": prompt_settings(self.prompts, prompt_ids),
            "num_prompts": len(self.prompts),
            "num_cut_prompts": num_cut,
        }
        notes = [*remarks(rows), *NOTES, *broken_promises(ratios.values)]
        wrong = [*wrong_outputs(taken), *differing_offs(taken)]
        return document("ablation", machine, settings, rows, ratios, RATIO_NOTE, notes, wrong, divergences=[])

    def _measure(
        self, services: Services, group: Group, prompt_ids: Sequence[Sequence[int]], advance: Callable[[], None]
    ) -> Measured:
        with contextlib.ExitStack() as channels:
            plain = channels.enter_context(grpc.insecure_channel(services.plain))
            contenders: list[Contender] = [CoppiceContender(OFF, plain, Mode.MODE_OFF)]
            for variant in group.variants:
                channel = channels.enter_context(grpc.insecure_channel(services.address(variant)))
                urls = [services.drafters[drafter].metrics_url for drafter in variant.asked]
                contenders.append(MeteredContender(_contender(variant, channel), urls))
            plan = replace(self.plan, temperatures=group.temperatures)
            return Measured(group, measure(contenders, prompt_ids, plan, advance), tuple(contenders))


def _contender(variant: Variant, channel: grpc.Channel) -> CoppiceContender:
    settings = " ".join(f"{name}={value}" for drafter in variant.asked for name, value in drafter.settings)
    asked = "" if variant.denoising == LEFT_TO_DRAFTER else str(variant.denoising)
    named = f"sources {'+'.join(variant.sources)}" if variant.sources else ""
    return CoppiceContender(
        variant.contender,
        channel,
        Mode.MODE_FORCED if variant.sources else Mode.MODE_AUTO,
        setting=", ".join(filter(None, (named, settings, asked, "traversal" if variant.traversal else ""))),
        sources=variant.sources,
        acceptance=AcceptanceRule.ACCEPTANCE_RULE_TRAVERSAL if variant.traversal else None,
        denoising=variant.denoising,
    )


def ablation_rows(measured: Sequence[Measured]) -> list[Row]:
    """The latency benchmark's row of each variant and temperature, and what its drafters counted."""
    return [_row(one, row) for one in measured for row in latency_rows(one.samples, one.contenders)]


def _row(measured: Measured, row: Row) -> Row:
    counted = measured.counted(row["contender"], row["temperature"])
    trees = round(counted.total(_DRAFTS))
    nodes = row.get("draft_tokens", 0) / row["rounds"] if row["rounds"] else None
    # A third of a row of the latency benchmark, whose business it is.
    kept = {key: value for key, value in row.items() if key != "ms_per_pass_by_rows"}
    return {
        **kept,
        "name": f"{measured.group.name}: {row['name']}",
        "group": measured.group.name,
        "nodes_per_round": rounded(nodes, 4),
        "draft_ahead_hits": row["draft_ahead_hits"] if row.get("expected_outcomes") else None,
        "trees": trees,
        "draft_ms": rounded(1000 * counted.total(_DRAFT_S) / trees, 4) if trees else None,
        "observed_nodes": round(counted.total(_OBSERVED)),
        "calibration_error": rounded(calibration_error(counted), 4),
        "chance_error": rounded(chance_error(counted), 4),
        # Drawn trees follow the target's law and not its noise.
        **({"identical": None, "num_identical": None} if row["contender"] in measured.drawing else {}),
    }


def wrong_outputs(measured: Sequence[Measured]) -> list[Mismatch]:
    """Every output with speculation that is not that of speculation off in its group, but for those that are drawn."""
    return [wrong for one in measured for wrong in mismatches(one.samples) if wrong.contender not in one.drawing]


def differing_offs(measured: Sequence[Measured]) -> list[Mismatch]:
    """Outputs without speculation that are not those of the first group that has such."""
    first: dict[tuple[float, int, int], tuple[int, ...]] = {}
    return [
        Mismatch(OFF, OFF, temperature, run, prompt)
        for one in measured
        for temperature in one.samples.each("temperature")
        for (run, prompt), token_ids in outputs(one.samples, OFF, temperature).items()
        if first.setdefault((temperature, run, prompt), token_ids) != token_ids
    ]


def ablation_ratios(measured: Sequence[Measured], kinds: Sequence[str]) -> ByRun:
    """The named ratios of each run, of the groups that were measured."""
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
        for temperature in groups[COUPLING].samples.each("temperature"):
            shares = {kind: _recovered(groups[SOURCES], groups[COUPLING], kind, temperature) for kind in kinds}
            found |= _by_kind("coupling-recovered", "", temperature, shares)
    return found


def _of_shapes(measured: Measured, kinds: Sequence[str]) -> ByRun:
    found: ByRun = {}
    for temperature in measured.samples.each("temperature"):
        for ending, figure in _FIGURES.items():
            values = {
                kind: over(*(measured.by_run(name(kind), temperature, figure) for name in (tree_name, chain_name)))
                for kind in kinds
            }
            found |= _by_kind("tree/chain", ending, temperature, values)
    return found | _over_greedy(measured, {kind: tree_name(kind) for kind in kinds}, ".full")


def _of_acceptance(measured: Measured, kinds: Sequence[str]) -> ByRun:
    return {
        at_temperature(f"coupled/traversal.{kind}", temperature): over(
            measured.tau(tree_name(kind), temperature), measured.tau(traversal_name(kind), temperature)
        )
        for temperature in measured.samples.each("temperature")
        for kind in SMALL_LMS
    }


def _of_ahead(measured: Measured, kinds: Sequence[str]) -> ByRun:
    hits = {"draft-ahead-hits": figures.draft_ahead_hits, "guessed-outcomes": figures.guessed_outcomes}
    return {
        at_temperature(f"{label}.{variant.name.replace(' ahead=', '.')}", temperature): known(
            measured.by_run(variant.name, temperature, figure)
        )
        for temperature in measured.samples.each("temperature")
        for variant in measured.group.variants
        for label, figure in hits.items()
    }


def _over_greedy(measured: Measured, variants: Mapping[str, str], ending: str) -> ByRun:
    return {
        at_temperature(f"sampled/greedy.{kind}{ending}", temperature): over(
            measured.tau(variant, temperature), measured.tau(variant, 0.0)
        )
        for temperature in measured.samples.each("temperature")
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
    names = [combined(sources) for sources in combinations(kinds)]
    singles = [combined(sources) for sources in combinations(kinds) if len(sources) == 1]
    for temperature in measured.samples.each("temperature"):
        for name in names:
            found[at_temperature(f"{name}.tau", temperature)] = known(measured.tau(name, temperature))
        for ending, figure in _FIGURES.items():
            by_single = [known(measured.by_run(one, temperature, figure)) for one in singles]
            best = [max(values) for values in zip(*by_single, strict=True)]
            for label, name in (("merged", names[-1]), (PLANNER, PLANNER)):
                ratio = over(measured.by_run(name, temperature, figure), best)
                found[at_temperature(f"{label}/best-single{ending}", temperature)] = ratio
    return found | _over_greedy(measured, {kind: kind for kind in kinds}, "")


def _recovered(sources: Measured, coupling: Measured, kind: str, temperature: float) -> list[float]:
    greedy, coupled = known(sources.tau(kind, 0.0)), known(coupling.tau(kind, temperature))
    without = known(coupling.tau(uncoupled_name(kind), temperature))
    runs = zip(greedy, coupled, without, strict=False)
    return [(on - off) / (cold - off) for cold, on, off in runs if cold - off >= _LEAST_LOSS]


def _errors(measured: Measured, kinds: Sequence[str]) -> ByRun:
    """Without a kind: that of the worst drafter."""
    found: ByRun = {}
    for ending, name, error in (
        ("", str, calibration_error),
        ("-off", uncalibrated_name, calibration_error),
        ("-by-chance", str, chance_error),
    ):
        values = {kind: error(measured.counted(f"{ON} {name(kind)}")) for kind in kinds}
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


def _same(row: Mapping[str, Any]) -> str:
    return "" if row["identical"] is None else f"{row['num_identical']}/{row['num_prompts']}"


def short_name(row: Mapping[str, Any]) -> str:
    """A contender without what all variants are called."""
    return str(row["contender"]).removeprefix(f"{ON} ")


SHOWN = Shown(
    tables=(
        Table(
            "in turn with speculation off",
            {
                "T": "{temperature:g}",
                "τ": "{mean_acceptance_length:.2f}",
                "nodes": "{nodes_per_round:.1f}",
                "tokens/s": "{tokens_per_s:.0f}",
                "x off": "{speed_over_off:.2f}",
                "draft ms": "{draft_ms:.2f}",
                "calibration error": "{calibration_error:.3f}",
                "accepted at depth 1, 2, …": depth_cell,
                "same": _same,
            },
            label=short_name,
            by="group",
        ),
    ),
    panels=(
        Panel(
            "τ",
            bars,
            x=lambda row: f"{row['group']}: {short_name(row)}",
            y="mean_acceptance_length",
            series="T={temperature:g}",
            ylabel="tokens per round",
            where=lambda row: row["contender"] != OFF,
            has_base=True,
        ),
        Panel(
            "Sources alone: rounds that accepted this deep, of those drafted so deep",
            depths,
            y="acceptance_by_depth",
            series=lambda row: f"{short_name(row)} T={row['temperature']:g}",
            xlabel="depth in the tree",
            ylabel="share of rounds",
            where=lambda row: (
                row["group"] == SOURCES and "+" not in row["contender"] and short_name(row) not in (OFF, PLANNER)
            ),
        ),
    ),
    line="{num_prompts} prompts x {max_tokens} tokens x {num_runs} runs, {threads} threads, {rounds} rounds; "
    "at most {num_nodes} nodes a round. Repetition penalty {repetition_penalty:g}.",
)
