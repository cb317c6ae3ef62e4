"""The target's own drafts and early pruning, measured in turn with plain decoding.

A ratio that has no value in any run is left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from coppice.cli.topology import DrafterSpec
from coppice.lab.bench import comparison, figures
from coppice.lab.bench.ablation.groups import (
    FULL_TREES,
    DrafterSetting,
    Group,
    Measured,
    Services,
    Settings,
    Variant,
    VerifierSetting,
    counted_of,
    measure_groups,
)
from coppice.lab.bench.client import OFF, Meter
from coppice.lab.bench.comparison import Sample, Setup, answers_of, differing, outputs, short_name
from coppice.lab.bench.counters import Counters
from coppice.lab.bench.environment import describe_machine
from coppice.lab.bench.harness.experiment import ByRun, Ratios, Samples, at_temperature, known, over, quotient, rounded
from coppice.lab.bench.harness.plots import Panel, bars
from coppice.lab.bench.harness.report import Report, Row, Shown, document, shown_path
from coppice.lab.bench.harness.tables import Table
from orchestrator.request.rounds import REDRAFT

SPACE = "space"
DRAFTING = "drafting"
SWITCHES = ("off", "on", "auto", "compare")
COMPARE = SWITCHES[-1]

# Masks in a group and groups in a round that are tried.
MASKS_TRIED = (1, 2, 3, 5)
GROUPS_TRIED = (1, 2, 4)
# A verifier's own limit on the rows of a pass with masks would cut the larger of them.
_MANY_ROWS = ("REDRAFT_ROWS", "64")
# Where pruning is compared: full trees of the target's own, more masks and more ends, whatever the rows of a pass.
_FULL_REDRAFTS: Settings = (
    ("REDRAFT_MIN_PROBABILITY", "0"),
    ("REDRAFT_TOKENS", "3"),
    ("REDRAFT_GROUPS", "4"),
    ("REDRAFT_ROWS", "4096"),
)

# Passes whose rows differ by more are not the same trees.
MOST_DIFFERENCE = 0.05
_PREFIX = "coppice_verifier_"
PASSES = f"{_PREFIX}pass_seconds_count"
PASS_S = f"{_PREFIX}pass_seconds_sum"
ROWS = f"{_PREFIX}pass_rows_sum"
# The passes that these rows were of: one may end between the reading of its seconds and that of its rows.
ROW_PASSES = f"{_PREFIX}pass_rows_count"
NODES = f"{_PREFIX}spec_decode_num_draft_tokens_total"
MASKS = f"{_PREFIX}masks_total"
# Only there where the verifier has a head.
PRUNED_NODES = f"{_PREFIX}early_pruned_nodes_total"
PRUNED_PASSES = f"{_PREFIX}early_pruned_passes_total"
# Of passes that could be pruned, by whether they were.
PRUNABLE_ROWS = f"{_PREFIX}prunable_pass_rows_total"
PRUNABLE_S = f"{_PREFIX}prunable_pass_seconds_total"
COUNTED = (PASSES, PASS_S, ROWS, ROW_PASSES, NODES, MASKS, PRUNED_NODES, PRUNED_PASSES, PRUNABLE_ROWS, PRUNABLE_S)


def ms_per_pass(counted: Counters) -> float | None:
    return quotient(1000 * counted.total(PASS_S), counted.total(PASSES))


def ms_per_row(counted: Counters, *, pruned: bool) -> float | None:
    """Milliseconds, for each row that they began with, of the passes that could be pruned and were, or were not."""
    label = (("pruned", "yes" if pruned else "no"),)
    rows = counted.values.get((PRUNABLE_ROWS, label), 0.0)
    return quotient(1000 * counted.values.get((PRUNABLE_S, label), 0.0), rows)


def removed_share(counted: Counters) -> float | None:
    """Share of the tree nodes that early pruning removed."""
    return quotient(counted.total(PRUNED_NODES), counted.total(NODES))


def pass_fields(counted: Counters) -> Row:
    """What passes were like, as a row has it; rows left are those after the layer that prunes."""
    passes = counted.total(PASSES)
    return {
        "passes": round(passes),
        "ms_per_pass": rounded(ms_per_pass(counted), 4),
        "rows_per_pass": rounded(quotient(counted.total(ROWS), counted.total(ROW_PASSES)), 4),
        "rows_left_per_pass": rounded(quotient(counted.total(ROWS) - counted.total(PRUNED_NODES), passes), 4),
        "masks_per_pass": rounded(quotient(counted.total(MASKS), passes), 4),
        "pruned_passes": round(counted.total(PRUNED_PASSES)),
        "removed_share": rounded(removed_share(counted), 4),
        "ms_per_whole_row": rounded(ms_per_row(counted, pruned=False), 4),
        "ms_per_pruned_row": rounded(ms_per_row(counted, pruned=True), 4),
    }


@dataclass(frozen=True, slots=True)
class InPass:
    """What there is to compare.

    `space` is a directory with an adapter of `num_masks` masks and `early_head` one with a head; empty: there is none.
    """

    drafter: DrafterSpec
    space: str = ""
    num_masks: int = 0
    early_head: str = ""
    masks: tuple[int, ...] = MASKS_TRIED
    groups: tuple[int, ...] = GROUPS_TRIED
    tree_sizes: tuple[int, ...] = ()
    batch_sizes: tuple[int, ...] = ()
    # Whether drafting is compared, too, and not pruning alone.
    drafting: bool = True

    @property
    def grid(self) -> dict[str, tuple[int, int]]:
        """Masks and groups that are tried, by variant; an adapter has only so many masks."""
        shapes = itertools.product((masks for masks in self.masks if masks <= self.num_masks), self.groups)
        return {f"{SPACE} k={masks} g={groups}": (masks, groups) for masks, groups in shapes}


def tree_sources(what: InPass) -> tuple[str, ...]:
    """Whose trees are pruned: first of all the target's own."""
    return (REDRAFT, what.drafter.kind) if what.space else (what.drafter.kind,)


def pruning_name(source: str, num_nodes: int, switch: str) -> str:
    """The name of the variant with a source's trees of so many nodes and this setting of early pruning."""
    return f"{source} n={num_nodes} pruning {switch}"


def make_groups(what: InPass, temperatures: tuple[float, ...]) -> tuple[Group, ...]:
    groups = [Group(DRAFTING, tuple(_drafting(what)), temperatures)] if what.drafting else []
    if what.early_head:
        pruning = tuple(_pruning(what))
        groups += [
            Group(f"pruning b={size}", pruning, temperatures, size, knows_prompts=True) for size in what.batch_sizes
        ]
    return tuple(groups)


def _drafting(what: InPass) -> Iterator[Variant]:
    kind, drafter = what.drafter.kind, DrafterSetting(what.drafter)
    if what.space:
        adapter = ("SPACE_ADAPTER", what.space)
        # As it serves where nothing else is set.
        usual = VerifierSetting((adapter,))
        yield Variant(SPACE, (), (REDRAFT,), usual)
        for name, (masks, groups) in what.grid.items():
            shape = (("REDRAFT_TOKENS", str(masks)), ("REDRAFT_GROUPS", str(groups)), _MANY_ROWS)
            yield Variant(name, (), (REDRAFT,), VerifierSetting((adapter, *shape)))
        yield Variant(f"{SPACE}+{kind}", (drafter,), (REDRAFT, kind), usual)
    yield Variant(kind, (drafter,), (kind,))


def _pruning(what: InPass) -> Iterator[Variant]:
    most, full = max(what.tree_sizes), DrafterSetting(what.drafter, FULL_TREES)
    own: Settings = ()
    if what.space:
        own = (("SPACE_ADAPTER", what.space), ("REDRAFT_NODES", str(most)), *_FULL_REDRAFTS)
    for source in tree_sources(what):
        for num_nodes in what.tree_sizes:
            for switch in SWITCHES:
                verifier = VerifierSetting((*own, ("EARLY_HEAD", what.early_head), ("EARLY_PRUNING", switch)))
                name = pruning_name(source, num_nodes, switch)
                variant = Variant(name, (), (source,), verifier, max_nodes=num_nodes)
                if source != REDRAFT:
                    variant = replace(variant, drafters=(full,), synchronous=True, most_nodes=most)
                yield variant


def in_pass_rows(measured: Sequence[Measured]) -> list[Row]:
    """A row per group, variant and temperature: the latency benchmark's, and what passes were like."""
    expected = outputs(sample for one in measured for sample in one.samples)
    return [_row(one, row, expected) for one in measured for row in one.rows()]


def _row(measured: Measured, row: Row, expected: comparison.Outputs) -> Row:
    samples = measured.samples.where(contender=row["contender"], temperature=row["temperature"])
    answers = answers_of(samples)
    variants = {variant.contender: variant for variant in measured.group.everyone}
    wrong = differing(answers, expected)
    return {
        **row,
        "batch_size": measured.group.batch_size,
        "max_nodes": variants[row["contender"]].max_nodes,
        # Those that verified the target's own draft as it was: nothing better had arrived.
        "redraft_rounds": row["origins"].get(REDRAFT, {"rounds": 0})["rounds"],
        **pass_fields(counted_of(samples)),
        "identical": not wrong,
        "num_identical": len(answers) - len(wrong),
        "num_requests": len(answers),
    }


def in_pass_ratios(measured: Sequence[Measured], what: InPass) -> ByRun:
    groups = {one.group.name: one for one in measured}
    found: ByRun = {}
    for temperature in groups[DRAFTING].temperatures if what.space and DRAFTING in groups else ():
        found |= _space(groups[DRAFTING], what, temperature)
    pruned = [groups[name] for size in what.batch_sizes if (name := f"pruning b={size}") in groups]
    for temperature in pruned[0].temperatures if pruned else ():
        for source in tree_sources(what):
            found |= _saved(pruned, what, source, temperature)
            for one in pruned:
                found |= _gains(one, what, source, temperature)
    return found


def best_space(measured: Measured, what: InPass, temperature: float) -> str:
    """The name of the fastest variant whose target drafts for itself, alone."""
    return max([SPACE, *what.grid], key=lambda name: fmean(value or 0.0 for value in measured.speed(name, temperature)))


def _space(measured: Measured, what: InPass, temperature: float) -> ByRun:
    kind, best = what.drafter.kind, best_space(measured, what, temperature)
    merged = f"{SPACE}+{kind}"
    speeds = {name: measured.speed(name, temperature) for name in (OFF, SPACE, best, merged, kind)}
    found = {
        "space/off": over(speeds[SPACE], speeds[OFF]),
        "space.best/off": over(speeds[best], speeds[OFF]),
        "space.tau": known(measured.tau(SPACE, temperature)),
        f"{merged}/{kind}": over(speeds[merged], speeds[kind]),
    }
    return {at_temperature(name, temperature): values for name, values in found.items()}


def _saved(pruned: Sequence[Measured], what: InPass, source: str, temperature: float) -> ByRun:
    """Over all sizes of trees and numbers of requests."""

    def together(switch: str) -> Samples[Sample]:
        names = [pruning_name(source, size, switch) for size in what.tree_sizes]
        return Samples(sample for one in pruned for name in names for sample in one.of(name, temperature))

    def tau(run: Sequence[Sample]) -> float | None:
        return figures.mean_acceptance_length(answers_of(run))

    on, off = together("on"), together("off")
    of = _of_source(source, what)
    return {
        at_temperature(f"rows-saved{of}", temperature): known(on.by_run(lambda run: removed_share(counted_of(run)))),
        at_temperature(f"tau-kept{of}", temperature): over(on.by_run(tau), off.by_run(tau)),
    }


def _gains(measured: Measured, what: InPass, source: str, temperature: float) -> ByRun:
    """Times are added up over the sizes of trees, one of each; no run in which a size has no pass that all shared."""

    def times(switch: str, figure: Callable[[Counters], float | None]) -> list[float | None]:
        names = [pruning_name(source, size, switch) for size in what.tree_sizes]
        by_size = [measured.of(name, temperature).by_run(lambda run: figure(counted_of(run))) for name in names]
        runs = zip(*by_size, strict=True)
        return [sum(found) if len(found := [value for value in run if value]) == len(run) else None for run in runs]

    whole = times(COMPARE, lambda counted: ms_per_row(counted, pruned=False))
    pruned = times(COMPARE, lambda counted: ms_per_row(counted, pruned=True))
    batch = f"b{measured.group.batch_size}{_of_source(source, what)}"
    return {
        at_temperature(f"pruning.time-gain.{batch}", temperature): over(whole, pruned),
        at_temperature(f"pruning.auto-gain.{batch}", temperature): over(
            times("off", ms_per_pass), times("auto", ms_per_pass)
        ),
    }


def _of_source(source: str, what: InPass) -> str:
    """What the names of ratios say of whose trees they are about."""
    return "" if source == tree_sources(what)[0] else f".{source}"


def uneven_trees(rows: Sequence[Row]) -> Iterator[str]:
    """Where passes with pruning began with other rows than those without.

    With many requests at once the verifier cuts their trees to the rows that its passes make cheap, and it learns these
    from its own passes.
    """
    found = {(row["group"], row["temperature"], row["contender"]): row for row in rows}
    without, *switches = SWITCHES
    for row in rows:
        name: str = row["contender"]
        if row["max_nodes"] is None or not name.endswith(without):
            continue
        for switch in switches:
            other = found[row["group"], row["temperature"], name.removesuffix(without) + switch]
            pair = row["rows_per_pass"], other["rows_per_pass"]
            if all(pair) and abs(pair[1] / pair[0] - 1) > MOST_DIFFERENCE:
                yield (
                    f"{other['name']}: passes begin with {pair[1]:.1f} rows, those without pruning with {pair[0]:.1f}: "
                    "their times compare other trees, too."
                )


async def measure_in_pass(
    setup: Setup,
    what: InPass,
    groups: Sequence[Group],
    num_prompts: int,
    left_out: Sequence[str],
    services: Services,
) -> Report:
    """The report of what the target does in its own passes; `left_out` says what is not compared, and why.

    Requests that are alone have `num_prompts` prompts, batches as many as they need. Raises BenchmarkError if the
    services failed, or a prompt does not fit the model.
    """
    machine = describe_machine()

    def meter(variant: Variant) -> Meter:
        url = services.verifiers[variant.verifier].metrics_url
        return Meter((url,), COUNTED, "a verifier", decoding_only=True)

    taken, settings = await measure_groups("in-pass", services, groups, setup, num_prompts, meter)
    rows = in_pass_rows(taken)
    settings |= {
        "drafter": {what.drafter.kind: shown_path(Path(what.drafter.model))},
        "space": shown_path(Path(what.space)) if what.space else None,
        "early_head": shown_path(Path(what.early_head)) if what.early_head else None,
        "masks_and_groups": [list(shape) for shape in what.grid.values()],
        "tree_sizes": list(what.tree_sizes),
        "batch_sizes": list(what.batch_sizes),
        "drafting": what.drafting,
        "num_prompts": num_prompts,
    }
    notes = [*comparison.remarks(rows), *_best(taken, what), *uneven_trees(rows), *left_out]
    ratios = Ratios.of(in_pass_ratios(taken, what))
    wrong = comparison.mismatches([sample for one in taken for sample in one.samples])
    return document("in-pass", machine, settings, rows, ratios, notes, wrong, divergences=[])


def _best(taken: Sequence[Measured], what: InPass) -> Iterator[str]:
    """Which row `space.best/off` is of."""
    for one in taken if what.space else ():
        for temperature in one.temperatures if one.group.name == DRAFTING else ():
            yield f"At T={temperature:g} space.best/off is that of {best_space(one, what, temperature)}."


def shown(report: Report) -> Shown:
    """Tables of all groups; pictures of drafting, and of pruning with the most requests at once."""
    most = max(row["batch_size"] for row in report["rows"])

    def is_drafting(row: Mapping[str, Any]) -> bool:
        return bool(row["group"] == DRAFTING and row["contender"] != OFF)

    def is_pruning(row: Mapping[str, Any]) -> bool:
        return bool(row["max_nodes"]) and row["batch_size"] == most

    pruning = f"Early pruning, {most} requests at once"
    return Shown(
        tables=(
            Table(
                "in turn with plain decoding; left: rows after the layer that prunes",
                "temperature tokens_per_s speed_over_off mean_acceptance_length rows_per_pass rows_left_per_pass "
                "ms_per_pass removed_share redraft_rounds rounds num_identical num_requests",
                label=short_name,
                by="group",
            ),
        ),
        panels=(
            Panel(
                "One request", "speed_over_off", short_name, "T={temperature:g}", bars, where=is_drafting, has_base=True
            ),
            Panel(pruning, "ms_per_pass", short_name, "T={temperature:g}", bars, where=is_pruning),
        ),
        line="{num_prompts} prompts x {max_tokens} tokens x {num_runs} runs, {threads} threads.",
    )
