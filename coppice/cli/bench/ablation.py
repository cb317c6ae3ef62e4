"""`coppice bench ablation`: what each drafter, shape of tree, way to choose children or part of a pass is worth."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coppice.checkpoints.bundled import MODELS, fitting_drafters
from coppice.cli.bench import options as opt
from coppice.cli.options import refusing
from coppice.cli.topology import DEFAULT_KIND, DrafterSpec, TopologySpec
from coppice.core.denoising import MAX_BLOCK_TOKENS, MAX_DENOISING_STEPS

if TYPE_CHECKING:
    from coppice.lab.bench.ablation.in_pass import InPass

ASYNCHRONOUS, SYNCHRONOUS = "asynchronous", "synchronous"
DRAFTERS, IN_PASS = "drafters", "in-pass"
# Prompts, tokens, runs and temperatures of each suite, and with --quick.
USUAL = {DRAFTERS: (8, 96, 3, [0.0, 0.7, 1.0]), IN_PASS: (4, 128, 2, [0.0, 1.0])}
QUICK = (2, 24, 1, [0.0, 1.0])
# What is tried, usually and with --quick: masks of semi-ar drafters; tokens of diffusion blocks and passes over each;
# most steps of a small LM after likely outcomes; most tokens of a sequence that drafters read. In the pass: requests
# at once, with pruning, and nodes of trees that are pruned.
GRIDS = {
    DRAFTERS: {
        "masks": ("2,4", ""),
        "gammas": ("4,8", ""),
        "denoising": ("1,2", ""),
        "ahead": ("2,8,32", ""),
        "contexts": ("128,512,2048", ""),
    },
    IN_PASS: {"batches": ("1,4,16", "1,4"), "trees": ("8,16,32", "8")},
}
# A verifier's own limit on a round's nodes is 64.
MOST = {"gammas": MAX_BLOCK_TOKENS, "denoising": MAX_DENOISING_STEPS, "trees": 64}
PARTS_IN_PASS = ("drafting", "pruning")
# Of plain decoding on two cores, to say beforehand about how long it will take.
TOKENS_PER_S = 150
# Room for the sequences of a benchmark; so many verifiers at once cannot each have the usual gibibyte.
KV_CACHE_MIB = 256


def ablation(
    options: opt.PromptSuiteOptions,
    suite: Annotated[
        str,
        typer.Option(metavar="SUITE", help="drafters, or in-pass: what the target does in its own passes is worth."),
    ] = DRAFTERS,
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND=DIR",
            help="Repeatable, one of a kind. Default: those that `coppice models` lists for the target, or every kind "
            "in models/; in-pass: one, small-lm.",
        ),
    ] = None,
    num_prompts: Annotated[
        int | None, typer.Option(min=1, help="How many prompts to use. Default: 8; in-pass: 4, batches what they need.")
    ] = None,
    per_category: opt.PerCategory = 0,
    max_tokens: Annotated[
        int | None, typer.Option(min=2, help="Tokens of each completion. Default: 96; in-pass: 128.")
    ] = None,
    runs: Annotated[int | None, typer.Option(min=1, help="Passes over all prompts. Default: 3; in-pass: 2.")] = None,
    temperature: Annotated[
        list[float] | None, typer.Option(help="Repeatable. Default: 0, 0.7 and 1; in-pass: 0 and 1.")
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=64,
            help="drafters: most nodes of a round's tree, all sources together; the orchestrator's MAX_NODES. "
            "Default: 15, its own.",
        ),
    ] = None,
    rounds: Annotated[
        str | None,
        typer.Option(
            metavar="FORM",
            help="drafters: asynchronous, as it serves (default); synchronous: each round waits for its draft, so that "
            "counts, τ among them, do not depend on how busy the machine is, and speed is not what it could be.",
        ),
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            max=100.0,
            help="drafters: of every request. Greedy outputs of small models loop, which flatters T=0; with 1.3 they "
            "hardly do. Default: 1, none.",
        ),
    ] = None,
    space: Annotated[
        Path | None, typer.Option(help="in-pass: the target's adapter. Default: models/space where there is one.")
    ] = None,
    early_head: Annotated[
        Path | None, typer.Option(help="in-pass: the early head. Default: the bundled target's.")
    ] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=N,N,…",
            help="Repeatable: values to try. Default: "
            + "; in-pass: ".join(
                ", ".join(f"{name}={usual}" for name, (usual, _) in grids.items()) for grids in GRIDS.values()
            ),
        ),
    ] = None,
    parts: Annotated[
        str | None,
        typer.Option(
            metavar="PART,PART,…",
            help="What is compared, of sources, shape, coupling, acceptance, calibration, masks, gamma, ahead and "
            "context; in-pass: of drafting and pruning. Default: all.",
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="2 prompts x 24 tokens, 1 run, T=0 and 1, no grids.")] = False,
) -> None:
    """Drafters alone, in pairs and all; trees and chains; coupling and calibration: in turn with speculation off.

    With --suite in-pass: the target's own drafts and early pruning. Exit code 1 when a token is not what it is with
    speculation off, but where trees are drawn.
    """
    options.begin()
    target, threads = options.target, options.threads
    ours = {"--nodes": nodes, "--rounds": rounds, "--repetition-penalty": repetition_penalty}
    _refuse(suite, {"--space": space, "--early-head": early_head} if suite == DRAFTERS else ours)
    usual = QUICK if quick else USUAL[suite]
    count, length, num_runs = num_prompts or usual[0], max_tokens or usual[1], runs or usual[2]
    temperatures, grids = opt.choose_temperatures(temperature or usual[3]), _grids(grid, suite, quick)
    form = rounds or ASYNCHRONOUS
    if form not in (ASYNCHRONOUS, SYNCHRONOUS):
        raise typer.BadParameter(f"--rounds: must be {ASYNCHRONOUS} or {SYNCHRONOUS}, got {rounds!r}")
    if suite == IN_PASS:
        what, left_out = _compared(target, drafter, (space, early_head), grids, parts, quick)
        count = max(count, *what.batch_sizes, 1)
    else:
        drafters = _drafters(drafter or (None if target == opt.TARGET else fitting_drafters(target.name) or None))
    chosen = options.choose_prompts(count, per_category=per_category)

    from coppice.lab.bench.ablation import drafters as of_drafters
    from coppice.lab.bench.ablation import in_pass
    from coppice.lab.bench.ablation.groups import num_requests, start_services
    from coppice.lab.bench.services import measure_on
    from orchestrator.config import Config

    setup = options.setup(chosen, num_runs, length, temperatures, repetition_penalty or 1.0)
    if suite == IN_PASS:
        alone = min(num_prompts or usual[0], len(chosen))
        groups = in_pass.make_groups(what, temperatures)
        in_the_pass = partial(in_pass.measure_in_pass, setup, what, groups, alone, left_out)
        total = num_requests(groups, alone, num_runs)
        minutes = f"{total * length / TOKENS_PER_S / 60:.0f} minutes at {TOKENS_PER_S} tokens/s"
        typer.echo(f"{total} completions: {minutes}, and the start", err=True)
        spec = TopologySpec(str(target), (), threads=threads, kv_cache_mib=KV_CACHE_MIB)
        report = asyncio.run(measure_on(spec, partial(start_services, groups=groups), in_the_pass))
        options.finish(report, in_pass.shown(report))
        return
    most, chosen_parts = nodes or Config.model_fields["max_nodes"].default, opt.choose_parts(parts, of_drafters.PARTS)
    groups = of_drafters.make_groups(drafters, temperatures, most, grids, chosen_parts, synchronous=form == SYNCHRONOUS)
    if not groups:
        raise typer.BadParameter(f"--parts: these drafters and temperatures give nothing to compare in {parts}")
    ablated = partial(of_drafters.measure_drafters, setup, drafters, groups, most, form)
    spec = TopologySpec(str(target), (), threads=threads)
    options.finish(asyncio.run(measure_on(spec, partial(start_services, groups=groups), ablated)), of_drafters.SHOWN)


def _refuse(suite: str, others: Mapping[str, object]) -> None:
    """Raises typer.BadParameter where there is no such suite, or an option is one of another suite's."""
    if suite not in GRIDS:
        raise typer.BadParameter(f"--suite: must be {DRAFTERS} or {IN_PASS}, got {suite!r}")
    for option, value in others.items():
        if value is not None:
            raise typer.BadParameter(f"{option}: means nothing to --suite {suite}")


def _grids(texts: list[str] | None, suite: str, quick: bool) -> dict[str, tuple[int, ...]]:
    """Values to try by name; raises typer.BadParameter where the suite has no such grid, or a value is none."""
    given = dict(text.partition("=")[::2] for text in texts or ())
    if unknown := sorted(given.keys() - GRIDS[suite].keys()):
        raise typer.BadParameter(f"--grid: must be of {', '.join(GRIDS[suite])}, got {', '.join(unknown)}")
    values = {name: given.get(name, usual[quick]) for name, usual in GRIDS[suite].items()}
    return {name: opt.numbers(text, f"--grid {name}", MOST.get(name)) for name, text in values.items()}


def _drafters(texts: list[str] | None) -> tuple[DrafterSpec, ...]:
    """One drafter of each kind; raises typer.BadParameter where there is none, or two of a kind."""
    from drafter_svc.drafters.kinds import KINDS

    if texts is None:
        found = tuple(DrafterSpec(kind, str(MODELS / kind)) for kind in KINDS if opt.has_checkpoint(MODELS / kind))
    else:
        found = tuple(map(opt.drafter_spec, texts))
    kinds = [spec.kind for spec in found]
    if not kinds or len(set(kinds)) < len(kinds):
        raise typer.BadParameter("--drafter: needs one checkpoint of each kind, and at least one")
    for spec in found:
        opt.require_checkpoint(Path(spec.model), "--drafter")
    return found


def _compared(
    target: Path,
    drafters: list[str] | None,
    checkpoints: tuple[Path | None, Path | None],
    grids: Mapping[str, tuple[int, ...]],
    parts: str | None,
    quick: bool,
) -> tuple[InPass, tuple[str, ...]]:
    """What --suite in-pass compares, and what is left out and why; `checkpoints` are those of adapter and head.

    Raises typer.BadParameter where an option makes no sense, or there is nothing to compare.
    """
    from coppice.lab.bench.ablation.in_pass import GROUPS_TRIED, MASKS_TRIED, InPass

    texts = drafters or [DEFAULT_KIND]
    if len(texts) > 1:
        raise typer.BadParameter("--drafter: --suite in-pass takes one")
    drafter = opt.drafter_spec(texts[0])
    opt.require_checkpoint(Path(drafter.model), "--drafter")
    space, num_masks = _space(checkpoints[0])
    head, missing = _early_head(checkpoints[1], target)
    left_out = [missing] if missing else []
    if not space:
        left_out.append("The target's own drafts are left out: no adapter (coppice train space, --space).")
    drafting, pruning = (part in opt.choose_parts(parts, PARTS_IN_PASS) for part in PARTS_IN_PASS)
    prunes = pruning and bool(head)
    if not (space or head) or not (drafting or prunes):
        raise typer.BadParameter(" ".join(["--parts: nothing to compare.", *left_out]))
    masks, groups = ((min(3, num_masks),), (1,)) if quick else (MASKS_TRIED, GROUPS_TRIED)
    if unknown := [count for count in masks if space and count > num_masks]:
        left_out.append(f"k={', '.join(map(str, unknown))} are left out: the adapter has {num_masks} masks.")
    sizes = (grids["trees"], grids["batches"]) if prunes else ((), ())
    what = InPass(drafter, space, num_masks, head if prunes else "", masks, groups, *sizes, drafting=drafting)
    return what, tuple(left_out)


def _space(directory: Path | None) -> tuple[str, int]:
    """The adapter's directory and its number of masks; nothing where none was asked for and none is bundled."""
    from coppice.core.errors import IncompatibleError
    from verifier_svc.extras.redraft.adapter import DESCRIPTION_FILE, load_adapter

    chosen = directory or MODELS / "space"
    if directory is None and not (chosen / DESCRIPTION_FILE).is_file():
        return "", 0
    with refusing("--space", IncompatibleError):
        return str(chosen.resolve()), load_adapter(chosen).num_masks


def _early_head(directory: Path | None, target: Path) -> tuple[str, str]:
    """The head's directory, the bundled target's by default, or why early pruning is left out."""
    chosen = directory or MODELS / "early-head"
    is_bundled = target.resolve() == (MODELS / "target").resolve()
    exists = (chosen / "early_head.json").is_file() and (directory is not None or is_bundled)
    if directory is not None and not exists:
        raise typer.BadParameter(f"--early-head: no head in {directory}")
    if not exists:
        return "", "Early pruning is left out: no head (coppice train early-exit, --early-head)."
    return str(chosen.resolve()), ""
