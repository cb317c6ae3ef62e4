"""`coppice bench ablation`: what each drafter, shape of tree, way to choose children or part of a pass is worth."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from coppice.checkpoints.bundled import MODELS
from coppice.cli.bench.in_pass import InPassOptions, Sizes, run_in_pass
from coppice.cli.bench.options import (
    OUT,
    TARGET,
    PromptsFile,
    Seed,
    Target,
    choose_parts,
    choose_prompts,
    choose_temperatures,
    drafter_spec,
    has_checkpoint,
    numbers,
    require_checkpoint,
)
from coppice.cli.bench.services import finish, run_or_exit
from coppice.cli.options import Threads
from coppice.cli.topology import DrafterSpec, TopologySpec
from coppice.core.denoising import MAX_BLOCK_TOKENS, MAX_DENOISING_STEPS
from coppice.kernels.openmp import set_spin_count

ASYNCHRONOUS, SYNCHRONOUS = "asynchronous", "synchronous"
DRAFTERS, IN_PASS = "drafters", "in-pass"
TEMPERATURES = [0.0, 0.7, 1.0]
# What `--quick` measures, unless an option says otherwise.
QUICK_TEMPERATURES = [0.0, 1.0]
USUAL_SIZES, QUICK_SIZES = (8, 96, 3), (2, 24, 1)


def ablation(
    suite: Annotated[
        str,
        typer.Option(metavar="SUITE", help="drafters, or in-pass: what the target does in its own passes is worth."),
    ] = DRAFTERS,
    prompts: PromptsFile = None,
    target: Target = TARGET,
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND=DIR",
            help="Repeatable, one of a kind. Default: every kind that is in models/; in-pass: one, small-lm.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Directory for ablation.json and .png, or in-pass.json and .png.")] = OUT,
    num_prompts: Annotated[
        int | None, typer.Option(min=1, help="How many prompts to use. Default: 8; in-pass: 4, batches what they need.")
    ] = None,
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
    masks: Annotated[
        str | None, typer.Option(metavar="K,K,…", help="drafters: masks of semi-ar drafters to try. Default: 2,4.")
    ] = None,
    gammas: Annotated[
        str | None, typer.Option(metavar="N,N,…", help="drafters: tokens of diffusion blocks to try. Default: 4,8.")
    ] = None,
    denoising_steps: Annotated[
        str | None, typer.Option(metavar="N,N,…", help="drafters: passes over each of these blocks. Default: 1,2.")
    ] = None,
    ahead_steps: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,…", help="drafters: most steps of a small LM behind likely outcomes. Default: 2,8,32."
        ),
    ] = None,
    contexts: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,…", help="drafters: most tokens of a sequence that they read. Default: 128,512,2048."
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
    batches: Annotated[
        str | None, typer.Option(metavar="N,N,…", help="in-pass: requests at once, with pruning. Default: 1,4,16.")
    ] = None,
    tree_sizes: Annotated[
        str | None, typer.Option(metavar="N,N,…", help="in-pass: nodes of trees that are pruned. Default: 8,16,32.")
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
    threads: Threads = 0,
    seed: Seed = 0,
) -> None:
    """Drafters alone, in pairs and all; trees and chains; coupling and calibration: in turn with speculation off.

    With --suite in-pass: the target's own drafts and early pruning. Exit code 1 when a token is not what it is with
    speculation off, but where trees are drawn.
    """
    set_spin_count()
    require_checkpoint(target, "--target")
    sizes = Sizes(num_prompts, max_tokens, runs)
    theirs = {
        "--space": space,
        "--early-head": early_head,
        "--batches": batches,
        "--tree-sizes": tree_sizes,
    }
    ours = {
        "--nodes": nodes,
        "--masks": masks,
        "--gammas": gammas,
        "--denoising-steps": denoising_steps,
        "--ahead-steps": ahead_steps,
        "--contexts": contexts,
        "--rounds": rounds,
        "--repetition-penalty": repetition_penalty,
    }
    _refuse(suite, theirs if suite == DRAFTERS else ours)
    if suite == IN_PASS:
        options = InPassOptions(
            target, drafter, space, early_head, batches, tree_sizes, parts, quick=quick, threads=threads
        )
        run_in_pass(options, prompts, sizes, temperature, seed, out)
        return
    drafters = _drafters(drafter)
    form = _form(rounds or ASYNCHRONOUS)
    tried = (
        numbers(masks or "2,4", "--masks"),
        numbers(gammas or "4,8", "--gammas", MAX_BLOCK_TOKENS),
        numbers(denoising_steps or "1,2", "--denoising-steps", MAX_DENOISING_STEPS),
        numbers(ahead_steps or "2,8,32", "--ahead-steps"),
        numbers(contexts or "128,512,2048", "--contexts"),
    )
    temperatures = choose_temperatures(temperature or (QUICK_TEMPERATURES if quick else TEMPERATURES))
    count, length, num_runs = sizes.or_else(QUICK_SIZES if quick else USUAL_SIZES)
    chosen = choose_prompts(prompts, count, seed)

    from coppice.lab.bench.ablation.suite import SHOWN, AblationSuite
    from coppice.lab.bench.ablation.variants import PARTS, Grids, make_groups
    from coppice.lab.bench.latency import Plan
    from coppice.lab.bench.services import measure_on
    from orchestrator.config import Config

    num_nodes = nodes or Config.model_fields["max_nodes"].default
    grids = Grids() if quick else Grids(*tried)
    groups = make_groups(
        drafters, temperatures, num_nodes, grids, choose_parts(parts, PARTS), has_planner=form == ASYNCHRONOUS
    )
    if not groups:
        raise typer.BadParameter(f"--parts: these drafters and temperatures give nothing to compare in {parts}")
    plan = Plan(num_runs, length, temperatures, seed, repetition_penalty or 1.0)
    ablation_suite = AblationSuite(
        target, drafters, groups, tuple(chosen), plan, num_nodes, form, threads or os.cpu_count() or 1
    )
    spec = TopologySpec(str(target), (), threads=threads)
    finish(run_or_exit(measure_on(spec, ablation_suite.start, ablation_suite.run)), SHOWN, out)


def _refuse(suite: str, others: Mapping[str, object]) -> None:
    """Raises typer.BadParameter where there is no such suite, or an option is one of another suite's."""
    if suite not in (DRAFTERS, IN_PASS):
        raise typer.BadParameter(f"--suite: must be {DRAFTERS} or {IN_PASS}, got {suite!r}")
    for option, value in others.items():
        if value is not None:
            raise typer.BadParameter(f"{option}: means nothing to --suite {suite}")


def _form(rounds: str) -> str:
    """Raises typer.BadParameter where there is no such form of rounds."""
    if rounds not in (ASYNCHRONOUS, SYNCHRONOUS):
        raise typer.BadParameter(f"--rounds: must be {ASYNCHRONOUS} or {SYNCHRONOUS}, got {rounds!r}")
    return rounds


def _drafters(texts: list[str] | None) -> tuple[DrafterSpec, ...]:
    """One drafter of each kind; raises typer.BadParameter where there is none, or two of a kind."""
    from drafter_svc.drafters.kinds import KINDS

    if texts is None:
        found = tuple(DrafterSpec(kind, str(MODELS / kind)) for kind in KINDS if has_checkpoint(MODELS / kind))
    else:
        found = tuple(map(drafter_spec, texts))
    kinds = [spec.kind for spec in found]
    if not kinds or len(set(kinds)) < len(kinds):
        raise typer.BadParameter("--drafter: needs one checkpoint of each kind, and at least one")
    for spec in found:
        require_checkpoint(Path(spec.model), "--drafter")
    return found
