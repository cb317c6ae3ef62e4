"""Named ratios of the in-pass suite, each within a run, then the median over runs.

`RATIO_NOTE` says what each is. A ratio that has no value in any run is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median

from coppice.lab.bench.in_pass import figures
from coppice.lab.bench.in_pass.measure import BatchSample, Measured
from coppice.lab.bench.in_pass.variants import (
    COMPARE,
    DRAFTING,
    SPACE,
    InPass,
    merged_name,
    pruning_group,
    pruning_name,
    space_names,
    tree_sources,
)
from coppice.lab.bench.summary import OFF, ON, ratio_name

RATIO_NOTE = (
    "medians over runs; plain names are T=0, '@T1' marks temperature 1. space/off: tokens/s of the target that drafts "
    "for itself, alone and as a verifier serves by default, over plain decoding; space.tau: its tokens per round; "
    "space.best/off: the same of the best shape of masks (chosen by these very figures, so that chance flatters it); "
    "space+KIND/KIND: tokens/s with the target's own drafts merged in over without. "
    "Early pruning of the target's own trees ('.KIND': of a drafter's, where there are both), on over off with the "
    "same budgets, all sizes of trees: rows-saved: share of tree nodes that it removes; tau-kept: τ with over without; "
    "pruning.time-gain.bN: of passes that are run both ways, one after the other, N requests at once, the time without "
    "over that with; pruning.auto-gain.bN: time of a pass with pruning off over that with "
    "EARLY_PRUNING=auto, in turn request by request"
)

# By name, a value for each run.
ByRun = dict[str, list[float]]


def ratios(measured: Sequence[Measured], what: InPass) -> tuple[dict[str, float], dict[str, list[float]]]:
    """The named ratios, and the smallest and largest value of each over the runs."""
    groups = {one.group.name: one for one in measured}
    found: ByRun = {}
    for temperature in groups[DRAFTING].temperatures if what.space and DRAFTING in groups else ():
        found |= _space(groups[DRAFTING], what, temperature)
    pruned = [groups[name] for name in map(pruning_group, what.batch_sizes) if name in groups]
    for temperature in pruned[0].temperatures if pruned else ():
        for source in tree_sources(what):
            found |= _saved(pruned, what, source, temperature)
            for one in pruned:
                found |= _gains(one, what, source, temperature)
    middle = {name: round(median(values), 4) for name, values in found.items() if values}
    return middle, {name: [round(min(v), 4), round(max(v), 4)] for name, v in found.items() if v}


def best_space(measured: Measured, what: InPass, temperature: float) -> str:
    """The name of the fastest variant whose target drafts for itself, alone."""

    def speed(name: str) -> float:
        values = figures.by_run(measured, f"{ON} {name}", temperature, figures.tokens_per_s)
        return fmean(value or 0.0 for value in values)

    return max(space_names(what), key=speed)


def _space(measured: Measured, what: InPass, temperature: float) -> ByRun:
    kind, best = what.drafter.kind, f"{ON} {best_space(measured, what, temperature)}"
    usual, merged, alone = f"{ON} {SPACE}", f"{ON} {merged_name(kind)}", f"{ON} {kind}"
    speeds = {
        name: figures.by_run(measured, name, temperature, figures.tokens_per_s)
        for name in (OFF, usual, best, merged, alone)
    }
    taus = figures.by_run(measured, usual, temperature, figures.mean_acceptance_length)
    return {
        ratio_name("space/off", temperature): figures.over(speeds[usual], speeds[OFF]),
        ratio_name("space.best/off", temperature): figures.over(speeds[best], speeds[OFF]),
        ratio_name("space.tau", temperature): [tau for tau in taus if tau is not None],
        ratio_name(f"{merged_name(kind)}/{kind}", temperature): figures.over(speeds[merged], speeds[alone]),
    }


def _saved(pruned: Sequence[Measured], what: InPass, source: str, temperature: float) -> ByRun:
    """Over all sizes of trees and numbers of requests."""
    runs, of = pruned[0].runs(), _of_source(source, what)
    on, off = ([_together(pruned, what, source, switch, temperature, run) for run in runs] for switch in ("on", "off"))
    shares = [figures.passes(samples).removed_share for samples in on]
    taus = [[figures.mean_acceptance_length(samples) for samples in one] for one in (on, off)]
    return {
        ratio_name(f"rows-saved{of}", temperature): [share for share in shares if share is not None],
        ratio_name(f"tau-kept{of}", temperature): figures.over(*taus),
    }


def _gains(measured: Measured, what: InPass, source: str, temperature: float) -> ByRun:
    """Times are added up over the sizes of trees, one of each."""

    def times(switch: str, figure: figures.Figure) -> list[float | None]:
        return _over_sizes(measured, what, source, switch, temperature, figure)

    whole, pruned = (times(COMPARE, figure) for figure in (figures.ms_per_whole_row, figures.ms_per_pruned_row))
    off, auto = times("off", figures.ms_per_pass), times("auto", figures.ms_per_pass)
    batch = f"b{measured.group.batch_size}{_of_source(source, what)}"
    return {
        ratio_name(f"pruning.time-gain.{batch}", temperature): figures.over(whole, pruned),
        ratio_name(f"pruning.auto-gain.{batch}", temperature): figures.over(off, auto),
    }


def _of_source(source: str, what: InPass) -> str:
    """What the names of ratios say of whose trees they are about."""
    return "" if source == tree_sources(what)[0] else f".{source}"


def _over_sizes(
    measured: Measured, what: InPass, source: str, switch: str, temperature: float, figure: figures.Figure
) -> list[float | None]:
    """A figure's sum over the sizes of trees, for each run; None where a size has no pass that all requests shared."""
    by_size = [
        figures.by_run(measured, f"{ON} {pruning_name(source, size, switch)}", temperature, figure)
        for size in what.tree_sizes
    ]
    runs = zip(*by_size, strict=True)
    return [sum(known) if len(known := [value for value in run if value]) == len(run) else None for run in runs]


def _together(
    pruned: Sequence[Measured], what: InPass, source: str, switch: str, temperature: float, run: int
) -> list[BatchSample]:
    names = [f"{ON} {pruning_name(source, size, switch)}" for size in what.tree_sizes]
    return [sample for one in pruned for name in names for sample in one.of(name, temperature, run)]
